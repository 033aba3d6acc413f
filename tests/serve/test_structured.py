"""Structured output over HTTP: the official client's own parsing, calls that are demanded, limits, and nobody who waits for a
compiler that is not his."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from serve.conftest import LIMITS, inside, listening, serving

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.infer.tools import grammar as grammars
from argosy.infer.tools.calls import CallNotation
from argosy.infer.tools.grammar import Grammars, Structure, grammar_masks, read_structure, unpacked_bits
from argosy.infer.tools.notations.hermes import HermesNotation
from argosy.infer.tools.notations.llama3 import Llama3Notation
from argosy.serve.app import App
from argosy.serve.openai.structured import check_structure
from argosy.serve.service import Service
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError

HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}<tool_call>{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}<assistant>"
)
# A random model says few blanks then, and its documents fit into the context.
TERSE = {"logit_bias": {str(ord(c)): -50 for c in " \n\r\t"}, "temperature": 1.5}
EOS = ByteTokenizer.eos


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: int | None
    tags: list[Literal["x", "y"]]


@pytest.fixture(scope="module")
def caller(lm: LM) -> LM:
    """The tiny model, with a template that teaches the calls of Hermes."""
    return LM(lm.config, lm.module, ByteTokenizer(TokenizerConfig(templates={"default": HERMES})))


@pytest.fixture(scope="module")
def served_caller(caller: LM) -> Iterator[tuple[str, Service]]:
    with serving(caller) as service, listening(service) as address:
        yield address, service


@pytest.fixture(scope="module")
def client(served_caller: tuple[str, Service]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served_caller[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES: Any = [{"role": "user", "content": "hi"}]
TALK: dict[str, Any] = {"model": "tiny", "messages": MESSAGES} | TERSE


# ---------------------------------------------------------------- formats


def test_the_official_client_parses_an_answer_into_its_class(client: openai.OpenAI):
    seen = set()
    for seed in range(4):
        answer = client.chat.completions.parse(response_format=Pet, seed=seed, **TALK)
        pet = answer.choices[0].message.parsed
        assert isinstance(pet, Pet)
        assert answer.choices[0].finish_reason == "stop"
        seen.add(answer.choices[0].message.content)
    assert len(seen) > 1


def test_a_stream_of_structured_output_joins_to_the_whole(client: openai.OpenAI):
    whole = client.chat.completions.parse(response_format=Pet, seed=1, **TALK).choices[0].message
    with client.chat.completions.stream(response_format=Pet, seed=1, **TALK) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(deltas) == final.message.content == whole.content
    assert final.message.parsed == whole.parsed
    assert final.finish_reason == "stop"
    assert len(deltas) > 5


def test_response_format_of_both_routes(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    schema_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True, "description": "a number"},
    }
    answer = client.completions.create(
        model="tiny", prompt="hi", max_tokens=60, n=3, extra_body={"response_format": schema_format} | TERSE
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), schema)
        assert choice.finish_reason == "stop"
    close = {"logit_bias": {str(ord("}")): 50}}
    json_answer = client.chat.completions.create(response_format={"type": "json_object"}, **TALK | close)
    assert json.loads(json_answer.choices[0].message.content or "") == {}
    for text in ({"type": "text"}, None):
        body: Any = {"response_format": text}
        assert client.chat.completions.create(max_tokens=2, extra_body=body, **TALK).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "constraint, pattern",
    [
        ({"regex": r"[ab]{3}-\d"}, r"[ab]{3}-\d"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9] "!"'}, r"x\d!"),
        ({"grammar": 'start: "x" /[0-9]/ "!"'}, r"x\d!"),
        ({"json": '{"enum": [1, "é"]}', "whitespace_pattern": " "}, '1|"é"'),
        ({"json": {"const": [1, 2]}, "disable_any_whitespace": True, "regex": None, "json_object": False}, r"\[1,2\]"),
    ],
)
def test_structured_outputs_as_vllm_names_them(client: openai.OpenAI, constraint: dict[str, Any], pattern: str):
    for path in (client.completions.create, client.chat.completions.create):
        prompt = {"prompt": "hi"} if path == client.completions.create else {"messages": MESSAGES}
        answer = path(model="tiny", max_tokens=20, temperature=1.2, extra_body={"structured_outputs": constraint}, **prompt)
        choice: Any = answer.choices[0]
        assert re.fullmatch(pattern, choice.text if "prompt" in prompt else choice.message.content)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def test_log_probabilities_come_with_the_tokens_and_not_with_the_end(client: openai.OpenAI):
    body: Any = {"structured_outputs": {"regex": "ab"}}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=1, extra_body=body, **TALK).choices[0]
    assert answer.logprobs is not None
    assert [score.token for score in answer.logprobs.content or []] == ["a", "b"]
    ids: Any = client.completions.create(model="tiny", prompt="hi", extra_body=body | {"return_token_ids": True}).choices[0]
    assert ids.token_ids == [97, 98]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_bans_have_blocked_says_so(client: openai.OpenAI, served_caller: tuple[str, Service], stream: bool):
    body = {"structured_outputs": {"regex": "abc"}, "bad_words": ["c"]}
    reply: Any = client.completions.create(model="tiny", prompt="hi", stream=stream, extra_body=body)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == "ab"
    assert choices[-1].finish_reason == "blocked"
    assert 'finished_reason="blocked"' in httpx.get(served_caller[0] + "/metrics").text


# ---------------------------------------------------------------- calls


CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"], "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", "Köln"]}}}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]


def check_calls(calls: Any) -> list[str]:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, CITY)
        else:
            assert (call.function.name, arguments) == ("time", {})
    return [call.function.name for call in calls]


@pytest.mark.slow
def test_a_call_that_is_demanded_comes_and_matches_the_schema_of_its_tool(client: openai.OpenAI):
    names = set()
    for seed in range(4):
        answer = client.chat.completions.create(
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, **TALK
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        calls = check_calls(answer.message.tool_calls)
        assert len(calls) == 1
        names |= set(calls)
    assert names == {"weather", "time"}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(tools=TOOLS, tool_choice=choice, **TALK).choices[0]
    assert check_calls(answer.message.tool_calls) == ["weather"]
    chunks = list(client.chat.completions.create(tools=TOOLS, tool_choice=choice, stream=True, **TALK))
    assert check_calls(chunks[-1].choices[0].delta.tool_calls) == ["weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_format_and_tools_give_a_call_or_the_format(client: openai.OpenAI):
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    fields: Any = {"tools": TOOLS[1:], "response_format": response_format}
    begins = {"<": "tool_calls", "1": "stop"}
    for first, reason in begins.items():
        bias = TALK | {"logit_bias": TERSE["logit_bias"] | {str(ord(first)): 60, str(ord("}")): 70, str(EOS): 90}}
        answer = client.chat.completions.create(**fields | bias).choices[0]
        assert answer.finish_reason == reason
        if reason == "stop":
            assert answer.message.content == "1"
        else:
            assert [call.function.name for call in answer.message.tool_calls or []] == ["time"]  # pyright: ignore


HELLO = "hello {"
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
NUMBER = read_structure({"json": {"enum": [1, 2]}})


@pytest.fixture(scope="module")
def over_bytes() -> Grammars:
    return Grammars(ByteTokenizer(), 258)


def accepts(store: Grammars, structure: Structure, text: str) -> bool:
    matcher = store.get(structure).matcher([EOS])
    for byte in [*text.encode(), EOS]:
        if not unpacked_bits(grammar_masks([matcher])[0][0], 258)[byte]:
            return False
        matcher.push(byte)
    return True


BERN, LLAMA_BERN = WEATHER.replace("Oslo", "Bern"), LLAMA.replace("Oslo", "Bern")
GRAMMARS: list[tuple[type[CallNotation], dict[str, Any], list[str], list[str]]] = [
    (HermesNotation, {"must": True, "many": True}, [WEATHER, TIME, f"{WEATHER}\n{TIME}"], [HELLO, "", f"a{TIME}", BERN]),
    (HermesNotation, {"must": True, "many": False}, [WEATHER], [f"{TIME}\n{TIME}", f"{TIME} "]),
    (HermesNotation, {"must": False, "many": True}, ["", HELLO, "<tool_", TIME, f"a <tool_ b{TIME}\n{TIME}"], [f"{TIME}a", BERN]),
    (HermesNotation, {"must": False, "many": False}, [HELLO, f"a{TIME}"], [f"{TIME}\n{TIME}", "a<tool_call>b", f"a{BERN}"]),
    (HermesNotation, {"must": False, "many": True, "answer": NUMBER}, ["1", TIME, f"{TIME}\n{TIME}"], [HELLO, f"1{TIME}", "3", BERN]),
    (Llama3Notation, {"must": True, "many": True}, [LLAMA], [HELLO, "", f"{LLAMA};{LLAMA}", LLAMA_BERN]),
    (Llama3Notation, {"must": False, "many": True}, [LLAMA, HELLO, "", "  x"], ['{"a": 1}', f"{LLAMA} ", " {", LLAMA_BERN]),
]


@pytest.mark.parametrize("notation, options, right, wrong", GRAMMARS)
def test_a_grammar_of_calls_is_text_then_calls_of_the_tools(
    over_bytes: Grammars, notation: type[CallNotation], options: dict[str, Any], right: list[str], wrong: list[str]
):
    structure = notation("").grammar(TOOLS, **options)
    assert [text for text in [*right, *wrong] if accepts(over_bytes, structure, text)] == right


# ---------------------------------------------------------------- limits


def post(served: tuple[str, Service], **body: Any) -> httpx.Response:
    return httpx.post(served[0] + "/v1/completions", json={"prompt": "hi", "max_tokens": 3} | body, timeout=60)


def test_a_schema_has_limits_of_size_and_depth(served_caller: tuple[str, Service]):
    deep: Any = {"type": "null"}
    for _ in range(LIMITS.schema_depth):
        deep = {"items": deep}
    large = {"enum": ["x" * 100] * 40}
    for schema, problem in ((deep, "deeper than 12 levels"), (large, "at most 3000")):
        answer = post(served_caller, structured_outputs={"json": schema})
        assert answer.status_code == 400
        assert problem in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "structured_outputs"
    assert post(served_caller, structured_outputs={"json": deep["items"]}).status_code == 200


@pytest.mark.parametrize(
    "constraint", [{"regex": "a?" * 5_000}, {"json": {"pattern": "a?" * 5_000}}, {"json": json.dumps({"pattern": "a?" * 5_000})},
              {"grammar": "start: A\nA: /" + "a?" * 5_000 + "/"}]
)  # fmt: skip
def test_a_regular_expression_has_a_limit_wherever_it_stands(constraint: dict[str, Any]):
    with pytest.raises(ApiError, match="a line of more than 8192 characters"):
        check_structure(constraint, "structured_outputs", ServerLimits())
    assert check_structure({"json": json.dumps({"enum": ["x" * 90] * 200})}, "structured_outputs", ServerLimits()).kind == "json"


def test_gbnf_has_a_limit_of_its_own():
    rules = "root ::= " + " |\n".join(f'"v{i}"' for i in range(3_000))
    with pytest.raises(ApiError, match="at most 16384 characters"):
        check_structure({"grammar": rules}, "structured_outputs", ServerLimits())
    assert check_structure({"grammar": rules.replace("root ::=", "start:")}, "structured_outputs", ServerLimits()).kind == "grammar"


@pytest.fixture
def compile_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars with the word `slow` are compiled once this is set."""
    hold, compiled = threading.Event(), grammars.Grammar._compiled

    def slow(self: Any) -> Any:
        if "slow" in self.structure.lark:
            assert hold.wait(60)
        return compiled(self)

    monkeypatch.setattr(grammars.Grammar, "_compiled", slow)
    yield hold
    hold.set()


def regexes(client: httpx.AsyncClient, *patterns: str | None) -> list[asyncio.Task[httpx.Response]]:
    body: dict[str, Any] = {"prompt": "hi", "max_tokens": 3}
    bodies = [body if pattern is None else body | {"structured_outputs": {"regex": pattern}} for pattern in patterns]
    return [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]


def test_a_grammar_that_takes_long_delays_nobody_else(caller: LM, compile_gate: threading.Event):
    """Requests without a grammar are answered meanwhile, and those whose grammar is known."""

    async def go(client: httpx.AsyncClient) -> None:
        assert (await regexes(client, "known")[0]).status_code == 200
        waiting = regexes(client, *(f"slow{i}" for i in range(6)))
        for task in regexes(client, None):
            assert (await task).status_code == 200
        assert not any(task.done() for task in waiting)
        compile_gate.set()
        assert [(await task).status_code for task in waiting] == [200] * 6

    with serving(LM(caller.config, caller.module, caller.tokenizer), LIMITS.model_copy(update={"compile_seconds": 60.0})) as service:
        inside(App(service).asgi, go)


def test_compiling_ends_with_a_reason_and_so_does_waiting_for_a_turn(caller: LM, compile_gate: threading.Event):
    async def go(client: httpx.AsyncClient) -> None:
        answers = [await task for task in regexes(client, *(f"slow{i}" for i in range(6)))]
        errors = [answer.json()["error"] for answer in answers]
        late = [error for error in errors if "takes more than 0.05 seconds" in error["message"]]
        assert [error["param"] for error in late] == ["structured_outputs"] * 2, "two are compiled at a time"
        assert {answer.status_code for answer in answers} == {400, 503}
        full = [answer for answer in answers if answer.status_code == 503]
        assert {answer.json()["error"]["code"] for answer in full} == {"grammar_queue_full"}
        assert all("retry-after" in answer.headers for answer in full)

    lm = LM(caller.config, caller.module, caller.tokenizer)
    lm.grammars().library()
    with serving(lm, LIMITS.model_copy(update={"compile_seconds": 0.05})) as service:
        inside(App(service).asgi, go)


def test_a_grammar_is_compiled_once_for_equal_requests(served_caller: tuple[str, Service], monkeypatch: pytest.MonkeyPatch):
    larks = []
    compiled = grammars.Grammar._compiled
    monkeypatch.setattr(grammars.Grammar, "_compiled", lambda self: (larks.append(self.structure.lark), compiled(self))[1])
    for _ in range(3):
        assert post(served_caller, structured_outputs={"regex": "once"}, n=2).status_code == 200
    # A thread of a test before, whose time was up, may compile its own now.
    assert len([lark for lark in larks if "once" in lark]) == 1
