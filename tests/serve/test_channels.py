"""The channels of gpt-oss: thoughts, answers and calls are told apart by special tokens, with structured output too."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers import shared
from serve.conftest import SIZES, Says, listening, serving
from serve.test_reasoning import TALK, say

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM
from argosy.infer.tools.channels import MARKS, ChannelParser, channel_marks, framed_grammar
from argosy.infer.tools.grammar import Grammars, Structure, grammar_masks, read_structure
from argosy.infer.tools.notations import find_notation
from argosy.models import FAMILIES
from argosy.serve.openai.chat import read_chat
from argosy.serve.openai.fields import ChatFields
from argosy.serve.run import build_service
from argosy.serve.service import Service
from argosy.serve.settings import ServeSettings
from argosy.weights.build import random_model

# The template writes 600 bytes of its own.
LONG = SIZES.model_copy(update={"context": 2048, "pages": 256})
IDS = dict(zip(MARKS, range(258, 300)))
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}},
}
THOUGHT = "<|channel|>analysis<|message|>Say hé.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello <|end|"
CALL = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}'


class Ids(list[int]):
    """What `Says` says, as tokens in place of bytes."""

    def encode(self) -> list[int]:
        return self


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with the marks as special tokens, and the template that OpenAI published with gpt-oss."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    content = json.loads(tokenizer_json())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": i, "content": name, "special": True} | plain for name, i in IDS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "chat_template.jinja").write_text(shared("chat_templates/openai-gpt-oss-120b.jinja").read_text())
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def lm(tokenizer: Tokenizer) -> LM:
    config = FAMILIES["llama"].examples()["plain"].model_copy(update={"vocab": 272, "context": 4096})
    return LM(config, random_model(config, 0).module, tokenizer)


@pytest.fixture(scope="module")
def service(lm: LM, tokenizer: Tokenizer) -> Iterator[Service]:
    with serving(lm, kind=Says, more={"marks": channel_marks(tokenizer)}, sizes=LONG) as service:
        yield service


def said(service: Service, text: str, status: int = 200, **body: Any) -> dict[str, Any]:
    assert service.lm.tokenizer is not None
    ids: Any = Ids(service.lm.tokenizer.encode(text, special=True))
    return say(service, ids, status, **body)


# ---------------------------------------------------------------- splitting


def as_marks(text: str) -> str:
    for name, mark in MARKS.items():
        text = text.replace(name, mark)
    return text


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text, thought, answer, calls",
    [
        (f"{THOUGHT}{FINAL}", "Say hé.", "Hello <|end|", []),
        (f"{THOUGHT}{CALL}<|call|>", "Say hé.", "", [("weather", '{"city":"Rome"}')]),
        # The header as the template writes old calls.
        ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}', "", "", [("f", "{}")]),
        (f'{CALL}<|end|>{CALL}', "", "", [("weather", '{"city":"Rome"}')] * 2),
        # A preamble is for the user. Two messages of a kind are two lines.
        ("<|channel|>commentary<|message|>Wait.<|end|>" + FINAL, "", "Wait.\nHello <|end|", []),
        (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, "Say hé.\nSay hé.", "Hello <|end|", []),
        # Cut short: in a thought, in a header, in the arguments of a call.
        ("<|channel|>analysis<|message|>Say", "Say", "", []),
        (THOUGHT + "<|start|>assistant<|channel|>fin", "Say hé.", "", []),
        (CALL[:-3], "", '{"city":"Rom', []),
        # No header at all.
        ("Hello", "", "Hello", []),
        ("x" * 1000, "", "x" * 1000, []),
        # A header that never ends is text, without its mark.
        (f"<|channel|>{'x' * 1000}", "", "x" * 1000, []),
        ("", "", "", []),
        # A tool of the model's own, which nobody offered.
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", "", []),
    ],
)
def test_an_answer_is_split_however_its_text_is_cut(text: str, thought: str, answer: str, calls: Any, size: int):
    channels, text = ChannelParser(calls=True), as_marks(text)
    parts = [channels.push(text[i : i + size]) for i in range(0, len(text), size)] + [channels.end()]
    assert "".join(part[0] for part in parts) == thought
    assert "".join(part[1] for part in parts) == answer
    assert channels.calls == calls


def test_text_is_not_held_back_and_a_continued_message_has_no_header():
    channels = ChannelParser()
    assert channels.push(as_marks("<|channel|>analysis<|message|>Let")) == ("Let", "")
    assert channels.push(" me") == (" me", "")
    assert not channels.over
    assert ChannelParser(continued=True).push("and so on") == ("", "and so on")


def test_marks_are_special_tokens_and_all_of_them(tokenizer: Tokenizer):
    assert list(channel_marks(tokenizer)) == list(IDS.values())
    assert channel_marks(ByteTokenizer()) == channel_marks(None) == {}
    # Written in ordinary tokens, a mark is text.
    stream = tokenizer.stream(True, channel_marks(tokenizer))
    assert "".join(map(stream.push, tokenizer.encode("<|end|>"))) == "<|end|>"
    assert stream.push(IDS["<|end|>"]) == MARKS["<|end|>"]
    # A character that a mark cuts is lost alone.
    assert stream.push("é".encode()[0]) + stream.push(IDS["<|end|>"]) == f"\ufffd{MARKS['<|end|>']}"


# ---------------------------------------------------------------- responses


def test_a_message_has_its_thoughts_and_calls_apart(service: Service):
    whole = said(service, THOUGHT + FINAL)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Hello <|end|", "Say hé.", "Say hé.")
    # Up to the mark that begins the text of the answer, as bytes and marks.
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(b"analysisSay he_.assistantfinal") + 6
    choice = said(service, THOUGHT + CALL, tools=[WEATHER])["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    call = choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    hidden = said(service, THOUGHT + FINAL, include_reasoning=False)["choices"][0]["message"]
    assert (hidden["content"], "reasoning" in hidden) == ("Hello <|end|", False)


def test_old_thoughts_and_calls_reach_the_template(service: Service):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assistant = {"role": "assistant", "content": None, "reasoning": "Say hé.", "tool_calls": [call]}
    messages = [*TALK["messages"], assistant, {"role": "tool", "tool_call_id": "c", "content": "warm"}]
    chat = read_chat(service, ChatFields.of(TALK | {"messages": messages, "tools": [WEATHER]}))
    assert service.lm.tokenizer is not None
    text = service.lm.tokenizer.decode(chat.prompt, skip_special=False)
    assert "<|channel|>analysis<|message|>Say hé.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json" in text
    assert text.endswith("<|start|>assistant")


def test_the_official_client_streams_channels(service: Service):
    front: Any = service.front
    assert service.lm.tokenizer is not None
    front.said = Ids(service.lm.tokenizer.encode(THOUGHT + CALL, special=True))
    with listening(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(stream=True, tools=[WEATHER], **TALK))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Say hé."
    (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert calls[0].function.arguments == '{"city":"Rome"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_parser_that_the_tokenizer_cannot_serve_is_refused(lm: LM):
    plain = LM(lm.config, lm.module, ByteTokenizer())
    with pytest.raises(BadInput, match="openai_gptoss needs"):
        build_service(plain, "tiny", ServeSettings(reasoning_parser="openai_gptoss"), None)


# ---------------------------------------------------------------- structured output


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 272)


def state(grammars: Grammars, structure: Structure, text: str) -> str:
    """The state of an answer in a structure; `refused` if one of its tokens is not allowed."""
    matcher = grammars.get(structure).matcher({IDS["<|return|>"]})
    for token in grammars.tokenizer.encode(text, special=True):
        allowed = grammar_masks([matcher])[0][0]
        if not int(allowed[token // 32]) >> token % 32 & 1:
            return "refused"
        matcher.push(token)
    return grammar_masks([matcher])[1][0]


OBJECT = read_structure({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}})


def test_an_answer_is_free_in_its_thoughts_and_bound_in_its_final_message(grammars: Grammars):
    whole, header = framed_grammar(OBJECT), FINAL.partition("Hello")[0]
    assert state(grammars, whole, THOUGHT + header + '{"a": 1}') == "complete"
    assert state(grammars, whole, header.removeprefix("<|start|>assistant") + '{"a": 1}') == "complete"
    for wrong in (THOUGHT + header + "[", "{", THOUGHT + THOUGHT, THOUGHT + CALL, "<|channel|>final<|message|><|end|>"):
        assert state(grammars, whole, wrong) == "refused", wrong


def test_calls_are_bound_to_their_schema(grammars: Grammars):
    notation = find_notation(grammars.tokenizer.chat_template or "", grammars.tokenizer)
    assert notation is not None
    must, may = (notation.grammar([WEATHER], must=must, many=False) for must in (True, False))
    for structure in (must, may):
        assert state(grammars, structure, THOUGHT + CALL) in ("complete", "accepting")
        assert state(grammars, structure, THOUGHT + CALL.replace("Rome", "Oslo")) == "refused"
        assert state(grammars, structure, THOUGHT + CALL.replace("weather", "other")) == "refused"
    assert state(grammars, must, THOUGHT + FINAL) == "refused"
    assert state(grammars, may, THOUGHT + FINAL) == "accepting"


def test_a_request_is_bound_behind_its_header(grammars: Grammars, service: Service):
    body = TALK | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}}
    chat = read_chat(service, ChatFields.of(body))
    assert chat.wanted is not None
    assert state(grammars, chat.wanted.structure, f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>1") == "complete"
    bound = read_chat(service, ChatFields.of(TALK | {"tools": [WEATHER], "tool_choice": "required"})).wanted
    assert bound is not None
    assert state(grammars, bound.structure, THOUGHT + CALL) in ("complete", "accepting")
