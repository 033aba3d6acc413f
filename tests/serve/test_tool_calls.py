"""Calls of Mistral, Gemma 4, DeepSeek and Kimi K2 over HTTP, with special tokens as marks: whole, in streams, demanded, sent back."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from infer.marked import NAMES, TOOLS, VOCAB, template, tokenizer_with_marks
from serve.conftest import SIZES, Says, listening, serving
from serve.test_reasoning import TALK, say

from argosy.infer.lm import LM
from argosy.infer.tools.notations.mistral import mistral_call_id
from argosy.models import FAMILIES
from argosy.serve.openai.chat import read_chat
from argosy.serve.openai.fields import ChatFields
from argosy.serve.service import Service
from argosy.weights.build import random_model

# The template of Kimi K2 writes 300 bytes of its own.
LONG = SIZES.model_copy(update={"context": 2048, "pages": 256})
TOOL: Any = {"type": "function", "function": {"name": "time", "description": "Now.", "parameters": {
    "type": "object", "properties": {"in": {"enum": ["Rome"]}}, "required": ["in"], "additionalProperties": False}}}  # fmt: skip
ARGUMENTS = '{"in": "Rome"}'
KIMI = f"<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
R1 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
# One call and two, as a model says them.
SAYS = {
    "nemo": (
        f'[TOOL_CALLS][{{"name": "time", "arguments": {ARGUMENTS}}}]',
        f'[TOOL_CALLS][{{"name": "time", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {ARGUMENTS}}}]',
    ),
    "v11": (f"[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}", f"[TOOL_CALLS]time[ARGS]{ARGUMENTS}" * 2),
    "v13": (f"[TOOL_CALLS]time[ARGS]{ARGUMENTS}", f"[TOOL_CALLS]time[ARGS]{ARGUMENTS}" * 2),
    "gemma": tuple('<|tool_call>call:time{in:<|"|>Rome<|"|>}<tool_call|>' * n for n in (1, 2)),
    "deepseek": tuple(f"<｜tool▁calls▁begin｜>{(R1 + chr(10)) * (n - 1)}{R1}<｜tool▁calls▁end｜>" for n in (1, 2)),
    "kimi": tuple(f"<|tool_calls_section_begin|>{KIMI * n}<|tool_calls_section_end|>" for n in (1, 2)),
}


class Ids(list[int]):
    """What `Says` says, as tokens in place of bytes."""

    def encode(self) -> list[int]:
        return self


@pytest.fixture(scope="module", params=SAYS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lm(name: str, tmp_path_factory: pytest.TempPathFactory) -> LM:
    config = FAMILIES["llama"].examples()["plain"].model_copy(update={"vocab": VOCAB, "context": 4096})
    # The template of DeepSeek R1 writes calls, and lists no tools.
    listed = TOOLS if name == "deepseek" else ""
    return LM(
        config, random_model(config, 0).module, tokenizer_with_marks(tmp_path_factory.mktemp(name), NAMES, listed + template(name))
    )


@pytest.fixture(scope="module")
def service(lm: LM) -> Iterator[Service]:
    with serving(lm, kind=Says, sizes=LONG) as service:
        yield service


def says(service: Service, text: str) -> Any:
    assert service.lm.tokenizer is not None
    return Ids(service.lm.tokenizer.encode(text, special=True))


def choice_of(service: Service, text: str, **body: Any) -> dict[str, Any]:
    return say(service, says(service, text), **body)["choices"][0]


def is_of(name: str, call_id: str, number: int = 0) -> bool:
    """Whether an id is one of the notation."""
    if name in ("deepseek", "gemma"):
        return call_id.startswith("call_")
    return call_id == f"functions.time:{number}" if name == "kimi" else len(call_id) == 9 and call_id.isalnum()


def test_calls_are_a_part_of_their_own(service: Service, name: str):
    first_text, two = SAYS[name]
    choice = choice_of(service, f"Let me see.{first_text}", tools=[TOOL])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "time", "arguments": ARGUMENTS})
    assert is_of(name, call["id"])
    if "a1b2c3d4e" in first_text:
        assert call["id"] == "a1b2c3d4e", "the model's own"
    first, second = choice_of(service, two, tools=[TOOL])["message"]["tool_calls"]
    assert is_of(name, first["id"])
    assert is_of(name, second["id"], 1)
    assert first["id"] != second["id"]


def test_what_is_no_call_is_text_with_its_marks(service: Service, name: str):
    first, _ = SAYS[name]
    cut = first[: first.index("Rome")]
    choice = choice_of(service, cut, tools=[TOOL])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", cut)
    choice = choice_of(service, "Hello [TOOL", tools=[TOOL])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Hello [TOOL")
    # Without tools, special tokens are no text.
    assert choice_of(service, "[TOOL_CALLS]Hello")["message"]["content"] == "Hello"


def test_a_call_is_sent_back_with_its_result(service: Service, name: str):
    """Also one that another model made. Its prompt has the call as the template writes it."""
    call = choice_of(service, SAYS[name][0], tools=[TOOL])["message"]["tool_calls"][0]
    assert service.lm.tokenizer is not None
    for call_id in (call["id"], "call_0123456789abcdef"):
        assistant = {"role": "assistant", "content": None, "tool_calls": [call | {"id": call_id}]}
        messages = [*TALK["messages"], assistant, {"role": "tool", "tool_call_id": call_id, "content": "noon"}]
        body = {"tools": [TOOL], "messages": messages}
        text = service.lm.tokenizer.decode(read_chat(service, ChatFields.of(TALK | body)).prompt, skip_special=False)
        before, _, after = SAYS[name][0].replace("}]", "").partition("a1b2c3d4e")
        assert f"{before}{'' if not after else call_id if len(call_id) == 9 else mistral_call_id(call_id)}{after}" in text
        # Calls are counted over the whole conversation.
        again = choice_of(service, SAYS[name][0], **body)["message"]["tool_calls"][0]["id"]
        assert is_of(name, again, 1)
        assert again != call_id


def test_the_official_client_streams_calls(service: Service, name: str):
    front: Any = service.front
    front.said = says(service, f"Let me see.{SAYS[name][1]}")
    with listening(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(stream=True, tools=[TOOL], **TALK))
        whole = client.chat.completions.create(tools=[TOOL], **TALK).choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    # A token at a time, and none of them waits for the calls.
    assert [delta.content for delta in deltas if delta.content] == list("Let me see.")
    (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert [call.index for call in calls] == [0, 1]
    for streamed, call in zip(calls, whole.message.tool_calls or [], strict=True):
        assert streamed.function is not None
        assert call.type == "function"
        assert (streamed.function.name, streamed.function.arguments) == ("time", ARGUMENTS)
        assert (call.function.name, call.function.arguments) == ("time", ARGUMENTS)
        assert is_of(name, streamed.id or "", streamed.index)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."


@pytest.mark.slow
def test_a_call_that_is_demanded_comes(lm: LM, name: str):
    """From a model that has learned nothing."""
    with serving(lm, sizes=LONG) as service:
        forced = {"type": "function", "function": {"name": "time"}}
        for choice in ("required", forced):
            answer = choice_of(service, "", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, seed=1)
            assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
            (call,) = answer["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("time", {"in": "Rome"})
            assert is_of(name, call["id"])


def test_values_are_read_by_the_schemas_that_a_request_offers(tmp_path_factory: pytest.TempPathFactory):
    """As Qwen 3.5 writes them, behind its thoughts."""
    config = FAMILIES["llama"].examples()["plain"].model_copy(update={"vocab": VOCAB, "context": 4096})
    lm = LM(config, random_model(config, 0).module, tokenizer_with_marks(tmp_path_factory.mktemp("qwen"), [], template("qwen3.5")))
    text = "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>"
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}
    with serving(lm, kind=Says, sizes=LONG.model_copy(update={"context": 4096, "pages": 512})) as service:
        for before, options in (("Hm.</think>\n\n", {}), ("", {"chat_template_kwargs": {"enable_thinking": False}})):
            message = choice_of(service, f"{before}{text}", tools=[tool], **options)["message"]
            assert (message["content"], message.get("reasoning")) == (None, "Hm." if before else None)
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 5, "b": "5"}
