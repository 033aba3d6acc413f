"""What is refused, and how: every limit, every wrong field; never a 5xx, and never a path."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import pytest
from serve.conftest import LIMITS, inside

from argosy.serve.anthropic.messages import Messages
from argosy.serve.app import App
from argosy.serve.openai.fields import OF_RENDERING, ChatFields, CompletionFields
from argosy.serve.openai.responses import Responses
from argosy.serve.service import Service
from argosy.web.fields import IGNORED, NEUTRAL

TOOL = {"type": "function", "function": {"name": "f"}}
Ask = Callable[..., httpx.Response]
TEXT = {"prompt": "hi", "max_tokens": 2}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "/" not in error["message"].replace("application/json", "")
    assert len(error["message"]) < 400
    return error


@pytest.mark.parametrize(
    "more, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "a" * 21}, "stop"),
        ({"stop": 3}, "stop"),
        ({"logprobs": 6}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a" * 65, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a" * 65, "echo": True, "logprobs": 0}, "echo"),
        ({"prompt": [1, 258], "echo": True, "max_tokens": 0}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"response_format": {"type": "json_objects"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "more": 1}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:9/x"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= " + "x" * 17_000}}, "structured_outputs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a\nb"}, "request_id"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(ask: Ask, more: dict[str, Any], param: str):
    error = error_of(ask("POST", "/v1/completions", json=TEXT | more))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        *(({"chat_template_kwargs": {name: "x"}}, "chat_template_kwargs") for name in sorted(OF_RENDERING)),
        ({"documents": ["a"]}, "documents"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_wrong_option_of_a_template_is_refused_by_its_name(ask: Ask, path: str, more: dict[str, Any], param: str):
    assert error_of(ask("POST", path, json={"messages": TALK["messages"]} | more))["param"] == param


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "documents", "tools"])
def test_options_of_a_template_are_not_for_a_text(ask: Ask, name: str):
    value: Any = [] if name in ("documents", "tools") else False
    assert error_of(ask("POST", "/tokenize", json={"prompt": "hi", name: value}))["param"] == name


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_that_is_not_supported_is_refused_unless_it_asks_for_nothing(ask: Ask, name: str):
    path, body = ("/v1/chat/completions", TALK) if name != "suffix" else ("/v1/completions", TEXT)
    error = error_of(ask("POST", path, json=body | {name: {"something": "else"}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert ("structured_outputs" in error["message"]) == name.startswith("guided_")
    for value in (None, *NEUTRAL[name]):
        assert ask("POST", path, json=body | {name: value}).status_code == 200


def test_an_unknown_field_is_refused_with_the_nearest_name(ask: Ask):
    error = error_of(ask("POST", "/v1/completions", json=TEXT | {"max_token": 3}))
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter")
    assert "did you mean `max_tokens`" in error["message"]
    # A client's own words come back shortened.
    assert len(error_of(ask("POST", "/v1/completions", json=TEXT | {"x" * 5000: 3}))["message"]) < 200


def test_fields_without_effect_on_an_answer_are_accepted(ask: Ask):
    more = dict.fromkeys(IGNORED, "x")
    assert ask("POST", "/v1/completions", json=TEXT | more).status_code == 200
    assert not set(IGNORED) & (set(ChatFields.model_fields) | set(CompletionFields.model_fields) | set(NEUTRAL))


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user", "content": "hi", "contents": 3}], "messages.0.contents"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0"),
        ([{"role": "user", "content": "hi"}, {"role": "wizard", "content": "hi"}], "messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "messages.0.tool_calls.0"),
        ([3], "messages.0"),
    ],
)
def test_wrong_messages_are_refused_by_their_place(ask: Ask, messages: list[Any], param: str):
    assert error_of(ask("POST", "/v1/chat/completions", json={"messages": messages}))["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_no_address_in_a_message_is_ever_opened(ask: Ask, monkeypatch: pytest.MonkeyPatch, kind: str):
    import socket

    def connect(*_: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    part = {"type": kind, kind: {"url": "http://127.0.0.1:9/x.png"}}
    error = error_of(ask("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]}))
    assert error["param"] == "messages.0.content.0"
    assert kind in error["message"]


@pytest.mark.parametrize(
    "more, param",
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_a_wrong_field_of_a_chat_is_refused_by_its_name(ask: Ask, more: dict[str, Any], param: str):
    assert error_of(ask("POST", "/v1/chat/completions", json=TALK | more))["param"] == param


def test_a_prompt_and_its_answer_must_fit_into_the_context(ask: Ask):
    for more in ({"prompt": "a" * 127}, {"prompt": [5] * 200}, {"prompt": "a" * 15_000}):
        assert error_of(ask("POST", "/v1/completions", json=TEXT | more))["code"] == "context_length_exceeded"
    assert ask("POST", "/v1/completions", json=TEXT | {"prompt": "a" * 126}).status_code == 200
    assert error_of(ask("POST", "/v1/completions", json={"prompt": [258]}))["message"].startswith("token id 258")


def test_another_model_is_not_here(ask: Ask):
    error = error_of(ask("POST", "/v1/completions", json=TEXT | {"model": "gpt-x"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert ask("POST", "/v1/completions", json=TEXT | {"model": "tiny"}).status_code == 200
    error_of(ask("GET", "/v1/models/gpt-x"), 404)
    assert ask("GET", "/v1/models/tiny").json()["id"] == "tiny"


# ---------------------------------------------------------------- bodies and headers


def test_a_body_is_json_of_limited_length(ask: Ask):
    json_type = {"content-type": "application/json"}
    error_of(ask("POST", "/v1/completions", content=b'{"prompt": "hi"}'), 415)
    error_of(ask("POST", "/v1/completions", content=b" " * 20_001, headers=json_type), 413)
    for body in (b"", b"{", b"[1]", b"3", b"null", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 9_000, b'{"n": ' + b"9" * 5_000 + b"}"):
        error_of(ask("POST", "/v1/completions", content=body, headers=json_type))


def test_too_many_headers_are_refused(ask: Ask):
    error_of(ask("GET", "/health", headers={f"x-{i}": "1" for i in range(20)}), 431)


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/v1/nothing", "there is nothing at GET /v1/nothing; there are /v1/completions, /v1/chat/completions, "),
        ("POST", "/chat/completions", "nothing at POST /chat/completions; did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/completions/", "did you mean /v1/completions?"),
        ("GET", "/v1/tokenize", "did you mean /tokenize?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/metric", "did you mean /metrics?"),
    ],
)
def test_an_address_that_is_not_there_is_answered_with_those_that_are(ask: Ask, method: str, path: str, says: str):
    answer = ask(method, path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert says in answer.json()["error"]["message"]
    assert len(answer.json()["error"]["message"]) < 400


def test_another_method_is_answered_with_the_right_one(ask: Ask):
    for method, path, takes in (("GET", "/v1/completions", "POST"), ("PUT", "/v1/models", "GET, HEAD")):
        answer = ask(method, path)
        assert (answer.status_code, answer.json()["error"]["message"]) == (405, f"{method} {path}: this address takes {takes}")


def test_a_key_is_asked_of_everything_but_probes(service: Service):
    app = App(service, key="s3cret").asgi
    right = {"authorization": "Bearer s3cret"}

    async def go(client: httpx.AsyncClient) -> list[int]:
        wrong = [{}, {"authorization": "Bearer s3cre"}, {"authorization": "s3cret"}, {"authorization": "Bearer s3crét"}]
        paths = ("/v1/models", "/metrics", "/load", "/version", "/nothing")
        for path in paths:
            for headers in wrong:
                raw = {name: value.encode() for name, value in headers.items()}
                error_of(await client.get(path, headers=raw), 401)
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        lower = {"authorization": "bearer s3cret"}
        assert (await client.get("/v1/models", headers=lower)).status_code == 200
        return [(await client.get(path)).status_code for path in ("/health", "/ping")]

    assert inside(app, go) == [200, 200]


def test_a_server_without_a_key_answers_to_names_of_the_loopback_only(service: Service):
    app = App(service, local=True).asgi

    async def go(client: httpx.AsyncClient) -> None:
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"):
            assert (await client.get("/version", headers={"host": host})).status_code == 200
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "10.0.0.1"):
            assert error_of(await client.get("/version", headers={"host": host}), 403)["code"] == "unknown_host"

    inside(app, go)


def test_what_was_not_foreseen_is_a_500_that_says_nothing(service: Service, capsys: pytest.CaptureFixture[str]):
    app = App(service)
    models: Any = next(route for route in app.asgi.router.routes if getattr(route, "path", None) == "/v1/models")
    models.app = raise_error

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app.asgi, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v1/models")

    import asyncio

    error = asyncio.run(go())
    assert error.status_code == 500
    assert error.json()["error"]["message"] == "internal error"
    assert "a secret" in capsys.readouterr().err


async def raise_error(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("a secret")


# ---------------------------------------------------------------- anything at all


SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT | {"stop": ["x"], "seed": 3, "n": 2, "logprobs": 0, "temperature": 0.5}),
    ("/v1/chat/completions", TALK | {"top_p": 0.9, "tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": True}),
    ("/tokenize", TALK),
    ("/detokenize", {"tokens": [1, 2, 300]}),
    ("/v1/responses", {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, {"role": "assistant", "content": "a"},
                  {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                  {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "a", "output": "b"}],
        "max_output_tokens": 1, "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": [], "metadata": {"a": "b"},
    }),
    ("/v1/messages", {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                     {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}],
        "max_tokens": 1, "system": "a", "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"},
    }),
    ("/v1/messages/count_tokens", {"messages": TALK["messages"], "system": [{"type": "text", "text": "a"}]}),
]  # fmt: skip
ODD = [None, True, 0, -1, 2**63, 2**70, 1e308, 0.5, "", "x", "\ud800", "é" * 50, [], {}, [[]], [None], {"a": None}, [-1], ["", 1]]


def spoil(value: Any, rng: Random) -> Any:
    """The value with one part replaced, removed or added, somewhere in its depth."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        kinds = (ChatFields, CompletionFields, Responses, Messages)
        fields = [*(name for kind in kinds for name in kind.model_fields), *NEUTRAL, "x" * 40]
        return value | {key: spoil(value[key], rng)} | ({rng.choice(fields): rng.choice(ODD)} if rng.random() < 0.5 else {})
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], spoil(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def test_no_body_whatever_makes_a_5xx(service: Service):
    rng, seen = Random(7), {200: 0, 400: 0}

    async def go(client: httpx.AsyncClient) -> None:
        for _ in range(400):
            path, body = rng.choice(SEEDS)
            body = spoil(body, rng)
            if path.endswith("completions") and isinstance(body, dict) and rng.random() < 0.9:
                body["max_tokens"] = 1
            if rng.random() < 0.2:
                path = rng.choice(SEEDS)[0]
            raw = json.dumps(body).encode()
            if rng.random() < 0.1:
                raw = raw[: rng.randrange(len(raw))] + bytes([rng.randrange(256)])
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=raw, headers=headers)
            assert answer.status_code in (200, 400, 404), (path, raw, answer.text)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

    inside(App(service).asgi, go)
    assert seen[400] > 100, seen
    assert seen[200] > 10, seen
    assert not service.front.opened
    assert LIMITS.answers == 16
