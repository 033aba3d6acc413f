"""/v1/messages: read by Anthropic's own client, whole and streamed, and its errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from serve.conftest import LIMITS, Says, Spoken, inside, listening, serving
from serve.test_reasoning import OPENED, QWEN, with_template

from argosy.infer.lm import LM
from argosy.serve.anthropic.blocks import chat_messages, tool_use_block
from argosy.serve.anthropic.messages import CountedMessages, Messages
from argosy.serve.app import App
from argosy.serve.engine.admission import timed_out
from argosy.serve.service import Service

BARE = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
TOOL: Any = {"name": "f", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
HI: dict[str, Any] = {"model": "tiny", "max_tokens": 78, "messages": [{"role": "user", "content": "hi"}]}
ADAPTIVE: Any = {"type": "adaptive"}


@pytest.fixture(scope="module")
def speaker(lm: LM) -> Iterator[Service]:
    """A service whose model says what a test wants."""
    # The official client sends 23 headers with a stream.
    limits = LIMITS.model_copy(update={"headers": 64})
    with serving(with_template(lm, QWEN), limits, kind=Says) as service:
        yield service


def client_of(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, **({"api_key": "none"} | options), max_retries=0)


@pytest.fixture(scope="module")
def client(speaker: Service) -> Iterator[anthropic.Anthropic]:
    with listening(speaker) as url, client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def real(lm: LM) -> Iterator[anthropic.Anthropic]:
    """A client of the engine's own answers."""
    with serving(lm) as service, listening(service) as url, client_of(url) as client:
        yield client


def says(service: Service, text: str) -> None:
    front: Any = service.front
    front.said = text


def post(service: Service, body: dict[str, Any], path: str = "/v1/messages", **kwargs: Any) -> httpx.Response:
    async def go(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body, **kwargs)

    return inside(App(service).asgi, go)


# ---------------------------------------------------------------- whole messages


def test_an_answer_is_that_of_the_chat_it_is_translated_to(real: anthropic.Anthropic):
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]
    message = real.messages.create(system="be brief", messages=messages, model="tiny", max_tokens=12, extra_body=sampling)
    # Without `thinking` the template is asked for none, and writes `!` then.
    body = {"messages": [{"role": "system", "content": "be brief"}, *messages], "max_tokens": 12, "reasoning_effort": "none"}
    body["messages"][1] = {"role": "user", "content": "hi"}
    chat = httpx.post(str(real.base_url.join("/v1/chat/completions")), json=sampling | body).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]  # pyright: ignore
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", "tiny", "max_tokens")
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (read, message.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
    tokens = real.messages.count_tokens(model="tiny", system="be brief", messages=messages)
    assert tokens.input_tokens == read


def test_thoughts_text_and_calls_are_blocks(speaker: Service, client: anthropic.Anthropic):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    message = client.messages.create(thinking=ADAPTIVE, tools=[TOOL], **HI)
    assert [block.to_dict() for block in message.content[:2]] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Ok"},
    ]
    call: Any = message.content[2]
    assert (call.type, call.name, call.input, message.stop_reason) == ("tool_use", "f", {"a": 1}, "tool_use")
    assert call.id.startswith("toolu_")
    omitted = client.messages.create(thinking={"type": "adaptive", "display": "omitted"}, tools=[TOOL], **HI)
    assert [block.type for block in omitted.content] == ["text", "tool_use"]


def test_without_thinking_a_model_is_told_not_to_or_its_thoughts_are_left_out(speaker: Service, client: anthropic.Anthropic, lm: LM):
    says(speaker, "Hello")
    switched, thinks = (client.messages.create(**HI, **more) for more in ({}, {"thinking": ADAPTIVE}))
    assert switched.usage.input_tokens - thinks.usage.input_tokens == len("<think>\n\n</think>\n\n")
    with serving(with_template(lm, OPENED), kind=Says) as always:
        says(always, "hm</think>\nHello")
        for more in ({}, {"thinking": {"type": "disabled"}}):
            assert post(always, HI | more).json()["content"] == [{"type": "text", "text": "Hello"}]


def test_a_message_counts_cached_tokens_apart(speaker: Service, client: anthropic.Anthropic):
    says(speaker, "Hello")
    usage = client.messages.create(thinking=ADAPTIVE, **HI).usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 0)
    assert usage.input_tokens == len("<user>hi<assistant>\n") - 3
    assert usage.output_tokens == len("Hello") + 1


def test_a_stop_sequence_is_told(speaker: Service, client: anthropic.Anthropic):
    says(speaker, "Hello you")
    message = client.messages.create(stop_sequences=["lo", "x"], **HI)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "lo", "Hel")  # pyright: ignore
    ended = client.messages.create(**HI)
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_a_demanded_call_and_a_format_bind_the_answer(real: anthropic.Anthropic, speaker: Service):
    few: dict[str, Any] = {"logit_bias": {str(ord(c)): -50 for c in " \n\r\t"}, "temperature": 1.5}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    message = real.messages.create(output_config={"format": {"type": "json_schema", "schema": schema}}, extra_body=few, **HI)
    assert json.loads(message.content[0].text)["a"] in (1, 2)  # pyright: ignore
    from argosy.serve.anthropic import messages

    for choice, has in (({"type": "any"}, True), ({"type": "tool", "name": "f"}, True), ({"type": "auto"}, False)):
        job = messages.prepare_messages(speaker, HI | {"tools": [TOOL], "tool_choice": choice})
        assert (job.wanted is not None) == has
    single = messages.prepare_messages(
        speaker, HI | {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    )
    assert single.wanted is not None


# ---------------------------------------------------------------- streams


def test_a_stream_has_the_events_of_the_api_in_their_order(speaker: Service, client: anthropic.Anthropic):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    with client.messages.stream(thinking=ADAPTIVE, tools=[TOOL], **HI) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_message()
    whole = client.messages.create(thinking=ADAPTIVE, tools=[TOOL], **HI)
    for streamed_block, other in zip(final.content, whole.content, strict=True):
        assert streamed_block.to_dict() | {"id": ""} == other.to_dict() | {"id": ""}
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert "".join(event.text for event in events if event.type == "text") == "Ok"
    lines = post(speaker, HI | {"thinking": ADAPTIVE, "tools": [TOOL], "stream": True}).text.split("\n\n")
    assert lines.pop() == ""
    names, documents = zip(*(part.removeprefix("event: ").split("\ndata: ") for part in lines))
    documents = [json.loads(document) for document in documents]
    assert [document["type"] for document in documents] == list(names)
    block = lambda *deltas: ["content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop"]  # noqa: E731
    expected = [*block(*"hm", "signature"), *block(*"Ok"), *block("call")]
    assert list(names) == ["message_start", "ping", *expected, "message_delta", "message_stop"]
    deltas = [document["delta"]["type"] for document in documents if document["type"] == "content_block_delta"]
    assert deltas == [*["thinking_delta"] * 2, "signature_delta", *["text_delta"] * 2, "input_json_delta"]
    assert [document["index"] for document in documents if "index" in document] == [0] * 5 + [1] * 4 + [2] * 3
    assert documents[0]["message"]["content"] == []
    assert documents[-2]["usage"]["cache_read_input_tokens"] == 3


def test_a_failure_under_way_has_the_shape_of_the_api(speaker: Service, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch):
    says(speaker, "Hello")
    whole = Spoken.__aiter__

    async def fails(self: Spoken) -> Any:
        async for event in whole(self):
            yield event
            raise timed_out(600)

    monkeypatch.setattr(Spoken, "__aiter__", fails)
    last = post(speaker, HI | {"stream": True}).text.split("\n\n")[-2].split("\n")
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "timeout_error"
    with client.messages.stream(**HI) as stream, pytest.raises(anthropic.APIStatusError, match="600 seconds"):
        stream.until_done()


# ---------------------------------------------------------------- the input


def test_blocks_become_the_messages_of_a_chat():
    chat = chat_messages(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "a", "citations": None},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "there"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}], "is_error": False},
                {"type": "tool_result", "tool_use_id": "toolu_2"},
            ]},
        ]
    )  # fmt: skip
    assert chat == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a\nb", "reasoning": "hm",
         "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
        {"role": "user", "content": "there"},
    ]  # fmt: skip


def test_arguments_that_are_no_object_are_the_input_of_one():
    for text, expected in (('{"a": 1}', {"a": 1}), ("[1]", {"input": [1]}), ("{", {"input": "{"})):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}
        assert tool_use_block(call) == {"type": "tool_use", "id": "toolu_1", "name": "f", "input": expected}


def test_a_message_can_be_sent_back(speaker: Service, client: anthropic.Anthropic):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    first = client.messages.create(thinking=ADAPTIVE, tools=[TOOL], **HI)
    call: Any = first.content[2]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}]}
    messages_back: Any = [*HI["messages"], {"role": "assistant", "content": [block.to_dict() for block in first.content]}, result]
    counted = client.messages.count_tokens(model="tiny", messages=messages_back, thinking=ADAPTIVE)
    assert counted.input_tokens == len("<user>hi<assistant>(hm)Okf<tool>2<assistant>\n")


def user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    "more, field",
    [
        (user({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}), "image"),
        (user({"type": "document", "source": {}}), "document"),
        (user({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "tool_use"),
        (user({"type": "text", "text": "a", "texts": 1}), "messages.0.content.0.texts"),
        (user({"type": "text"}), "messages.0.content.0.text"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "redacted_thinking"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop string"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "always"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config"),
        ({"mcp_servers": [{"url": "http://127.0.0.1:9"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"n": 2}, "n"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name_in_the_shape_of_the_api(speaker: Service, more: dict[str, Any], field: str):
    answer = post(speaker, HI | more)
    assert answer.status_code == 400, answer.text
    document = answer.json()
    assert document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"
    assert field in document["error"]["message"]
    if "max_tokens" not in more and "stop_sequences" not in more:
        counted = {name: value for name, value in (HI | more).items() if name != "max_tokens"}
        assert post(speaker, counted, "/v1/messages/count_tokens").status_code == 400


def test_fields_that_ask_for_nothing_are_accepted(speaker: Service):
    says(speaker, "Hello")
    nothing = {name: values[0] for name, values in CountedMessages.neutral.items() if values}
    for more in (nothing, dict.fromkeys(CountedMessages.neutral), {name: {} for name in CountedMessages.ignored}):
        assert post(speaker, HI | more).json()["content"][0]["text"] == "Hello"
    assert not CountedMessages.neutral.keys() & Messages.model_fields.keys()


def test_mistakes_are_the_exceptions_of_the_client(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**HI | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(extra_body={"temperature": -1}, **HI)


def test_the_key_may_come_as_anthropic_sends_it(speaker: Service):
    says(speaker, "Hello")
    with listening(speaker, api_key="s3cret") as url:
        for credentials in ({"api_key": "s3cret"}, {"api_key": None, "auth_token": "s3cret"}):
            with client_of(url, **credentials) as client:
                assert client.messages.create(**HI).content[0].text == "Hello"  # pyright: ignore
        for key in ("s3cre", "", "s3crét"):
            answer = httpx.post(f"{url}/v1/messages", json=HI, headers={"x-api-key": key.encode()})
            assert (answer.status_code, answer.json()["type"]) == (401, "error")
            assert answer.json()["error"]["type"] == "authentication_error"


def test_other_mistakes_have_the_shape_of_the_api_too(speaker: Service):
    for path, body, status, kind in (
        ("/v1/messages", b"{", 400, "invalid_request_error"),
        ("/v1/messages", b" " * 30_000, 413, "request_too_large"),
        ("/v1/messages/nothing", b"{}", 404, "not_found_error"),
    ):

        async def go(client: httpx.AsyncClient, path: str = path, body: bytes = body) -> httpx.Response:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

        answer = inside(App(speaker).asgi, go)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
