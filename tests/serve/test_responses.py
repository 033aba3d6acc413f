"""/v1/responses: read by the official client, whole and streamed; stored, continued, made in the background."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from serve.conftest import Says, inside, listening, serving
from serve.test_reasoning import with_template

from argosy.infer.lm import LM
from argosy.serve.app import App
from argosy.serve.openai.response_store import ResponseStore, StoredResponse
from argosy.serve.openai.responses import Responses
from argosy.serve.openai.responses_input import input_messages, with_instructions
from argosy.serve.service import Service
from argosy.web.errors import ApiError
from argosy.web.fields import Fields

# A call in a conversation is shown as its name; thoughts as (...).
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}<a>{% if false %}</think>{% endif %}"
)
THINKS = "<think>hm</think>\nHello"
BARE = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HI: dict[str, Any] = {"model": "tiny", "input": "hi"}
# A random model says few blanks then, and its documents fit into the context.
TERSE = {"logit_bias": {str(ord(c)): -50 for c in " \n\r\t"}, "temperature": 1.5}


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def speaker(lm: LM) -> Iterator[Service]:
    """A service whose model says what a test wants, and which keeps three responses."""
    with serving(with_template(lm, TEMPLATE), kind=Says, more={"store": ResponseStore(3)}) as service:
        yield service


@pytest.fixture(scope="module")
def client(speaker: Service) -> Iterator[openai.OpenAI]:
    with listening(speaker) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(lm: LM) -> Iterator[openai.OpenAI]:
    """A client of the engine's own answers, on a server that keeps nothing."""
    with (
        serving(lm) as service,
        listening(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def says(service: Service, text: str) -> None:
    front: Any = service.front
    front.said = text


# ---------------------------------------------------------------- whole responses


def test_an_answer_is_that_of_the_chat_it_is_translated_to(real: openai.OpenAI):
    options: dict[str, Any] = {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "extra_body": {"seed": 3, "top_k": 20}}
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = real.chat.completions.create(messages=messages, max_tokens=12, **options)
    response = real.responses.create(instructions="be brief", input="hi", max_output_tokens=12, **options)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.model) == ("incomplete", "response", "tiny")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # pyright: ignore
    assert (response.temperature, response.top_p, response.instructions, response.max_output_tokens) == (0.7, 0.9, "be brief", 12)
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert response.store is False  # pyright: ignore


def test_the_official_client_parses_a_response_into_its_class(real: openai.OpenAI):
    response = real.responses.parse(model="tiny", input="hi", text_format=Pet, temperature=1.5, extra_body=TERSE)
    assert isinstance(response.output_parsed, Pet)
    assert response.status == "completed"
    with real.responses.stream(model="tiny", input="hi", text_format=Pet, extra_body=TERSE) as stream:
        parsed = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == parsed[0]


def test_thoughts_text_and_calls_are_items(speaker: Service, client: openai.OpenAI):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    response = client.responses.create(tools=[TOOL], **HI)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    thought, message, call = response.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert call.type == "function_call"
    assert thought.content is not None
    assert (thought.content[0].text, thought.summary) == ("hm", [])
    assert (response.output_text, call.name, call.arguments) == ("Ok", "f", '{"a": 1}')
    assert {item.status for item in (thought, message, call)} == {"completed"}
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    assert response.usage.input_tokens_details.cached_tokens == 3
    hidden = client.responses.create(extra_body={"include_reasoning": False}, tools=[TOOL], **HI)
    assert [item.type for item in hidden.output] == ["message", "function_call"]


def test_an_empty_answer_is_an_empty_message(speaker: Service, client: openai.OpenAI):
    says(speaker, "")
    response = client.responses.create(**HI)
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""
    events = [event.type for event in client.responses.create(stream=True, **HI)]
    assert events[2:-1] == [f"response.{name}" for name in (
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
    )]  # fmt: skip


def test_log_probabilities_are_those_of_the_text(speaker: Service, client: openai.OpenAI):
    says(speaker, "<think>hm</think>\nHé")
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(**HI, **options).output[1]
    assert response.type == "message"
    scores: Any = response.content[0].logprobs  # pyright: ignore
    # The line break behind the thoughts and the end are tokens of the answer, though no text.
    assert [score.token for score in scores] == ["\n", "H", "�", "�", "<eos>"]
    assert [len(score.top_logprobs) for score in scores] == [2] * len(scores)
    with client.responses.stream(**HI, **options) as stream:
        streamed = [score for event in stream if event.type == "response.output_text.delta" for score in event.logprobs]
    assert [score.token for score in streamed] == [score.token for score in scores][: len(streamed)]
    assert len(streamed) == len(scores) - 1


# ---------------------------------------------------------------- streams


def test_a_stream_has_the_events_of_the_api_in_their_order(speaker: Service, client: openai.OpenAI):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    with client.responses.stream(tools=[TOOL], **HI) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    part = ["content_part.added", "{}.delta", "{}.delta", "{}.done", "content_part.done"]
    expected = [
        *("created", "in_progress"),
        *("output_item.added", *(name.format("reasoning_text") for name in part), "output_item.done"),
        *("output_item.added", *(name.format("output_text") for name in part), "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.type.removeprefix("response.") for event in events] == expected
    assert [event.output_index for event in events if hasattr(event, "output_index")] == [0] * 7 + [1] * 7 + [2] * 4
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Ok"
    # The client takes the number of each event from the server, but for those that it makes anew.
    raw = list(client.responses.create(stream=True, tools=[TOOL], **HI))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    added = [event.item.id for event in raw if event.type == "response.output_item.added"]  # pyright: ignore
    assert added == [item.id for item in raw[-1].response.output]  # pyright: ignore


def test_events_have_names_and_no_end_mark(speaker: Service):
    says(speaker, "Hello")

    async def go(client: httpx.AsyncClient) -> str:
        return (await client.post("/v1/responses", json=HI | {"stream": True})).text

    parts = inside(App(speaker).asgi, go).split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("event: response.") and "\ndata: {" in part for part in parts)


def test_an_answer_that_is_cut_short_ends_with_incomplete(speaker: Service, client: openai.OpenAI):
    says(speaker, THINKS)
    last: Any = list(client.responses.create(stream=True, max_output_tokens=8, **HI))[-1]
    assert last.type == "response.incomplete"
    assert [item.type for item in last.response.output] == ["reasoning"]


# ---------------------------------------------------------------- the input


def test_items_become_the_messages_of_a_chat():
    messages = input_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": None}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": ""},
            {"type": "function_call_output", "call_id": "call_1", "output": "1"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": "e"},
        ]
    )  # fmt: skip
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in ((1, {"a": 1}), (2, {}))
    ]
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning": "hm", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert with_instructions("you are a cat", messages)[:2] == [
        {"role": "system", "content": "you are a cat\n\nbe brief"},
        {"role": "user", "content": "a\nb"},
    ]


def test_a_response_can_be_sent_back_as_input(speaker: Service, client: openai.OpenAI):
    says(speaker, f"<think>hm</think>\nOk{BARE}")
    first = client.responses.create(tools=[TOOL], **HI)
    call: Any = first.output[2]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    conversation: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), output]
    response = client.responses.create(model="tiny", input=conversation)
    assert response.usage is not None
    assert response.usage.input_tokens == len("<u>hi<a>(hm)Okf1<t>2<a>")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": "x", "contents": 1}]}, "input.0.contents"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9"}]}]}, "input.0.content.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"type": "web_search_call"}]}, "input.0"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[1"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:9"}]}, "tools.0"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [{"type": "function"}]}, "tools.0"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"background": True, "stream": True}, "stream"),
    ({"background": True, "store": False}, "store"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"n": 2}, "n"),
    ({"max_tokens": 2}, "max_tokens"),
]


@pytest.mark.parametrize("more, param", WRONG)
def test_a_wrong_field_is_refused_by_its_name(speaker: Service, more: dict[str, Any], param: str):
    async def go(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/responses", json=HI | more)

    answer = inside(App(speaker).asgi, go)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "messages" not in error["message"]


def test_fields_that_ask_for_nothing_are_accepted(speaker: Service, client: openai.OpenAI):
    says(speaker, "Hello")
    nothing = {name: values[0] for name, values in Responses.neutral.items() if values} | dict.fromkeys(Responses.neutral)
    body = nothing | dict.fromkeys(Responses.ignored - Responses.model_fields.keys(), "x")
    assert client.responses.create(extra_body=body, **HI).output_text == "Hello"
    assert issubclass(Responses, Fields)
    assert not Responses.neutral.keys() & Responses.model_fields.keys()


# ---------------------------------------------------------------- the store


def test_a_conversation_goes_on_from_a_stored_response(speaker: Service, client: openai.OpenAI):
    says(speaker, "<think>hm</think>\nHello")
    first = client.responses.create(instructions="be brief", **HI)
    second = client.responses.create(model="tiny", input="and?", previous_response_id=first.id, metadata={"a": "b"})
    assert second.usage is not None
    # The instructions are those of one request alone.
    assert second.usage.input_tokens == len("<u>hi<a>(hm)Hello<u>and?<a>")
    assert (second.previous_response_id, second.metadata, second.store) == (first.id, {"a": "b"}, True)  # pyright: ignore
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    third = client.responses.create(model="tiny", input="and?", previous_response_id=first.id, store=False)
    assert third.usage is not None
    assert third.usage.input_tokens == second.usage.input_tokens, "one that is not stored goes on from a stored one too"
    streamed: Any = list(client.responses.create(stream=True, **HI))[-1]
    assert client.responses.retrieve(streamed.response.id).output_text == "Hello"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    unstored = client.responses.create(store=False, **HI)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_the_oldest_response_makes_room(speaker: Service, client: openai.OpenAI):
    says(speaker, "Hello")
    names = [client.responses.create(**HI).id for _ in range(4)]
    for name in names[1:]:
        assert client.responses.retrieve(name).output_text == "Hello"
    with pytest.raises(openai.BadRequestError, match="no response") as caught:
        client.responses.create(previous_response_id=names[0], **HI)
    assert caught.value.param == "previous_response_id"


def test_a_server_that_keeps_nothing_says_so(real: openai.OpenAI):
    for more in ({"store": True}, {"background": True}, {"previous_response_id": "resp_x"}):
        with pytest.raises(openai.BadRequestError, match="stored_responses") as refused:
            real.responses.create(**HI, **more)
        assert refused.value.param == next(iter(more))
    with pytest.raises(openai.NotFoundError, match="stored_responses"):
        real.responses.retrieve("resp_x")


# ---------------------------------------------------------------- in the background


def in_background(service: Service, do: Any) -> None:
    """Runs a test in an event loop of its own, with a front whose answers wait for `release.set()`."""
    front: Any = service.front

    async def go(client: httpx.AsyncClient) -> None:
        front.waits = asyncio.Event()
        try:
            started = (await client.post("/v1/responses", json=HI | {"background": True})).json()
            assert (started["status"], started["output"]) == ("in_progress", [])
            await do(client, started["id"], front.waits)
        finally:
            front.waits.set()
            front.waits = None

    inside(App(service).asgi, go)


def test_a_response_is_made_in_the_background(speaker: Service):
    says(speaker, "Hello")

    async def go(client: httpx.AsyncClient, name: str, release: asyncio.Event) -> None:
        assert (await client.get(f"/v1/responses/{name}")).json()["status"] == "in_progress"
        refused = await client.post("/v1/responses", json=HI | {"previous_response_id": name})
        assert refused.json()["error"]["param"] == "previous_response_id"
        release.set()
        until = time.monotonic() + 30
        while (status := (await client.get(f"/v1/responses/{name}")).json())["status"] == "in_progress":
            assert time.monotonic() < until
            await asyncio.sleep(0)
        assert (status["status"], status["output"][0]["content"][0]["text"]) == ("completed", "Hello")
        # It is too late to cancel it.
        assert (await client.post(f"/v1/responses/{name}/cancel", json={})).json() == status

    in_background(speaker, go)


def test_a_response_in_the_background_can_be_cancelled_or_deleted(speaker: Service):
    async def cancel(client: httpx.AsyncClient, name: str, release: asyncio.Event) -> None:
        document = (await client.post(f"/v1/responses/{name}/cancel", json={})).json()
        assert document["status"] == "cancelled"
        assert (await client.get(f"/v1/responses/{name}")).json() == document
        task = speaker.store.get(name).task if speaker.store else None
        assert task is None

    async def delete(client: httpx.AsyncClient, name: str, release: asyncio.Event) -> None:
        task = speaker.store.get(name).task if speaker.store else None
        assert (await client.delete(f"/v1/responses/{name}")).json()["deleted"] is True
        assert task is not None
        assert task.cancelled()
        assert (await client.get(f"/v1/responses/{name}")).status_code == 404

    in_background(speaker, cancel)
    in_background(speaker, delete)


def test_what_is_under_way_is_not_dropped_for_something_new(speaker: Service):
    async def go(client: httpx.AsyncClient, name: str, release: asyncio.Event) -> None:
        more = [await client.post("/v1/responses", json=HI | {"background": True}) for _ in range(3)]
        assert [answer.status_code for answer in more] == [200, 200, 503]
        assert more[2].json()["error"]["code"] == "store_full"
        for response_id in (name, more[0].json()["id"], more[1].json()["id"]):
            assert (await client.post(f"/v1/responses/{response_id}/cancel", json={})).json()["status"] == "cancelled"

    in_background(speaker, go)


def test_an_answer_is_not_lost_where_everything_stored_is_still_running():
    async def go() -> None:
        store, task = ResponseStore(1), asyncio.create_task(asyncio.sleep(0))
        store.put(StoredResponse({"id": "running"}, task=task))
        for name in ("a", "b"):
            store.put(StoredResponse({"id": name}))
        assert store.get("running").task is task
        assert store.get("b").document == {"id": "b"}
        with pytest.raises(ApiError, match="no response"):
            store.get("a")
        await task

    asyncio.run(go())


def test_only_what_is_in_the_background_can_be_cancelled(speaker: Service, client: openai.OpenAI):
    says(speaker, "Hello")
    response = client.responses.create(**HI)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)


def test_a_failure_under_way_is_told(speaker: Service, monkeypatch: pytest.MonkeyPatch):
    from serve.conftest import Spoken

    from argosy.serve.engine.admission import timed_out

    says(speaker, "Hello")
    whole = Spoken.__aiter__

    async def fails(self: Spoken) -> Any:
        async for event in whole(self):
            yield event
            raise timed_out(600)

    monkeypatch.setattr(Spoken, "__aiter__", fails)

    async def go(client: httpx.AsyncClient) -> str:
        return (await client.post("/v1/responses", json=HI | {"stream": True})).text

    last = inside(App(speaker).asgi, go).split("\n\n")[-2]
    assert last.startswith("event: response.failed\n")
    assert "more than 600 seconds" in last

    async def background(client: httpx.AsyncClient, name: str, release: asyncio.Event) -> None:
        release.set()
        until = time.monotonic() + 30
        while (status := (await client.get(f"/v1/responses/{name}")).json())["status"] == "in_progress":
            assert time.monotonic() < until
            await asyncio.sleep(0)
        assert status["status"] == "failed"
        assert "600 seconds" in status["error"]["message"]

    in_background(speaker, background)
