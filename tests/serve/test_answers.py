"""Answers over a real socket: by the official client, and byte by byte. Their tokens are those of the model alone."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serve.conftest import LIMITS, Alone, listening, serving
from serve.conftest import alone as answer_alone

from argosy.infer.lm import LM
from argosy.serve.service import Service

PROMPT = "It was a dark"
GREEDY = {"model": "tiny", "temperature": 0.0}


@pytest.fixture(scope="module")
def served_model(lm: LM) -> Iterator[tuple[str, Service]]:
    with serving(lm) as service, listening(service) as address:
        yield address, service


@pytest.fixture(scope="module")
def client(served_model: tuple[str, Service]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served_model[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(served: tuple[str, Service], path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(served[0] + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(served: tuple[str, Service], path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The documents of a stream, whose framing is checked."""
    with httpx.stream("POST", served[0] + path, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        parts = answer.read().decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def alone(lm: LM, prompt: str | list[int] = PROMPT, most: int = 12, **sampling: Any) -> Alone:
    return answer_alone(lm, prompt, most, **sampling)


# ---------------------------------------------------------------- the official client


def test_a_completion_is_that_of_the_model(lm: LM, client: openai.OpenAI):
    answer = client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY)
    expected = lm.generate([PROMPT], max_tokens=12)[0]
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (13, 12, 25)


def test_prompts_come_in_four_forms(lm: LM, client: openai.OpenAI):
    ids = list(PROMPT.encode())
    forms: list[Any] = [PROMPT, [PROMPT, "b"], ids, [ids, [98]]]
    first, two = alone(lm).text, alone(lm, "b").text
    for form, expected in zip(forms, ([first], [first, two], [first], [first, two])):
        answer = client.completions.create(prompt=form, max_tokens=12, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    # Sixteen tokens unless told otherwise, as OpenAI has it.
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stream_joins_to_the_whole_answer(lm: LM, client: openai.OpenAI):
    chunks = list(
        client.completions.create(
            prompt=[PROMPT, "b"], max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    texts = ["".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i) for i in (0, 1)]
    assert texts == [alone(lm).text, alone(lm, "b").text]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == ["length", "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (14, 24)
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks[:-1])


def test_a_chat_is_rendered_with_the_template_of_the_model(lm: LM, client: openai.OpenAI):
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
    ]
    prompt = "<system>be brief<user>hi\nyou<assistant>"
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=12, **GREEDY)
    assert answer.choices[0].message.content == alone(lm, prompt).text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(messages=messages, max_tokens=12, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == alone(lm, prompt).text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: openai.OpenAI):
    talk: Any = [{"role": "user", "content": "hi" * 45}]
    answer = client.chat.completions.create(messages=talk, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 128


def test_tools_go_to_the_template_unless_none_may_be_called(client: openai.OpenAI):
    talk: Any = [{"role": "user", "content": "hi"}]
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    lengths = []
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(messages=talk, tools=tools, tool_choice=choice, max_tokens=1, **GREEDY)
        assert answer.usage is not None
        lengths.append(answer.usage.prompt_tokens)
    assert lengths[0] - lengths[1] == len("[weather]")


def test_logprobs_are_those_of_the_model(lm: LM, client: openai.OpenAI):
    expected = alone(lm, most=5)
    scores = client.completions.create(prompt=PROMPT, max_tokens=5, logprobs=0, **GREEDY).choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.tokens is not None
    np.testing.assert_allclose(scores.token_logprobs, expected.logprobs, atol=1e-4)
    assert len(scores.tokens) == len(scores.text_offset or []) == 5
    talk: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(messages=talk, logprobs=True, max_tokens=5, **GREEDY)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    utf8 = [byte for entry in content for byte in entry.bytes or []]
    assert bytes(utf8).decode("utf-8", "replace") == answer.choices[0].message.content
    np.testing.assert_allclose(
        [entry.logprob for entry in content], alone(lm, "<user>hi<assistant>", 5).logprobs, atol=1e-4
    )


def test_mistakes_are_the_exceptions_of_the_client(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-x", prompt="a")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "argosy"


# ---------------------------------------------------------------- the fields


def test_samples_without_a_seed_differ_and_with_one_repeat(lm: LM, served_model: tuple[str, Service]):
    def sampled(**more: Any) -> list[str]:
        body = post(served_model, prompt=PROMPT, max_tokens=12, temperature=1.0, n=2, **more)
        return [choice["text"] for choice in body["choices"]]

    texts = [text for _ in range(2) for text in sampled()]
    assert len(set(texts)) == 4, "each request and each of its answers has randomness of its own"
    assert sampled(seed=5) == sampled(seed=5) != sampled(seed=6)
    assert sampled(seed=5)[0] == alone(lm, seed=5, temperature=1.0).text
    # A seed's answer does not depend on the prompts beside it.
    both = post(served_model, prompt=["b", PROMPT], max_tokens=12, temperature=1.0, n=2, seed=5)
    assert [choice["text"] for choice in both["choices"][2:]] == sampled(seed=5)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"typical_p": 0.2},
        {"repetition_penalty": 5.0},
        {"presence_penalty": 2.0, "temperature": 0.1},
        {"frequency_penalty": 2.0, "temperature": 0.1},
    ],
)
def test_a_sampling_field_reaches_the_sampler(lm: LM, served_model: tuple[str, Service], sampling: dict[str, float]):
    sampling = {"temperature": 1.5} | sampling
    text = post(served_model, prompt=PROMPT, max_tokens=20, seed=3, **sampling)["choices"][0]["text"]
    assert text == alone(lm, most=20, seed=3, **sampling).text
    plain = {"temperature": sampling["temperature"]}
    assert text != post(served_model, prompt=PROMPT, max_tokens=20, seed=3, **plain)["choices"][0]["text"], "no effect here"


def test_the_likeliest_tokens_are_told(lm: LM, served_model: tuple[str, Service], client: openai.OpenAI):
    expected = alone(lm, most=3)
    scores = post(served_model, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=4)["choices"][0]["logprobs"]
    logits = lm.logits([[*PROMPT.encode(), *expected.tokens]])[0, len(PROMPT) - 1 : -1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    best = np.argsort(-log_probs, -1)[:, :4]
    np.testing.assert_allclose(scores["token_logprobs"], log_probs[range(3), expected.tokens], atol=1e-4)
    ids = post(served_model, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=4, return_tokens_as_token_ids=True)
    for place, candidates in enumerate(ids["choices"][0]["logprobs"]["top_logprobs"]):
        assert list(candidates) == [f"token_id:{token}" for token in best[place]]
        np.testing.assert_allclose(list(candidates.values()), log_probs[place, best[place]], atol=1e-4)
    talk: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(messages=talk, logprobs=True, top_logprobs=2, max_tokens=2, **GREEDY)
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy: the likeliest is the one"


def tokens_of(served: tuple[str, Service], **fields: Any) -> list[int]:
    return post(served, prompt=PROMPT, return_token_ids=True, ignore_eos=True, **fields)["choices"][0]["token_ids"]


def test_tokens_can_be_forced_banned_and_restricted(served_model: tuple[str, Service]):
    assert tokens_of(served_model, max_tokens=4, temperature=0, logit_bias={"65": 100.0}) == [65] * 4
    assert set(tokens_of(served_model, max_tokens=20, allowed_token_ids=[65, 66])) == {65, 66}
    greedy = tokens_of(served_model, max_tokens=4, temperature=0)
    assert greedy[0] not in tokens_of(served_model, max_tokens=4, temperature=0, logit_bias={str(greedy[0]): -100.0})
    few: dict[str, Any] = {"max_tokens": 60, "allowed_token_ids": [97, 98, 99], "seed": 1}
    assert b"ab" in bytes(tokens_of(served_model, **few))
    without = bytes(tokens_of(served_model, **few, bad_words=["ab"]))
    assert b"ab" not in without
    assert set(without) == set(b"abc")


def test_an_answer_has_its_least_tokens_before_it_may_stop(lm: LM, served_model: tuple[str, Service]):
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "allowed_token_ids": [97, 98], "seed": 4}
    assert len(post(served_model, **fields, stop="a")["choices"][0]["text"]) < 10
    body = post(served_model, **fields, stop="a", min_tokens=10, return_token_ids=True)["choices"][0]
    assert body["finish_reason"] == "stop"
    assert len(body["token_ids"]) > 10
    assert "a" in body["text"], "the stop string does not count before"


def test_top_k_of_minus_one_is_all(served_model: tuple[str, Service]):
    text, other = (post(served_model, prompt=PROMPT, seed=3, **more)["choices"][0]["text"] for more in ({}, {"top_k": -1}))
    assert text == other


def test_a_stop_string_ends_the_text_and_is_told(lm: LM, served_model: tuple[str, Service]):
    text = alone(lm, most=40).text
    stop = next(text[i : i + 2] for i in range(4, 30) if text[i : i + 2].isprintable() and "�" not in text[i : i + 2])
    cut = text[: text.index(stop)]
    body = post(served_model, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "nowhere"])
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    assert body["usage"]["completion_tokens"] < 40
    inclusive = post(served_model, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, include_stop_str_in_output=True)
    assert inclusive["choices"][0]["text"] == cut + stop
    chunks = events(served_model, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
    assert "".join(c["choices"][0]["text"] for c in chunks) == cut
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks) == 1


def test_a_stop_token_ends_the_answer_and_is_told(lm: LM, served_model: tuple[str, Service]):
    expected = alone(lm, most=12).tokens
    at = next(i for i in range(2, 12) if expected[i] not in expected[:i])
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop_token_ids": [expected[at]]}
    body = post(served_model, **fields, return_token_ids=True, logprobs=0)
    choice = body["choices"][0]
    assert choice["token_ids"] == expected[: at + 1], "its id is kept"
    assert len(choice["logprobs"]["token_logprobs"]) == at + 1, "and its log-probability"
    assert choice["text"] == lm.tokenizer.decode(expected[:at])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected[at])
    assert body["usage"]["completion_tokens"] == at + 1


def ending(lm: LM) -> tuple[list[int], int]:
    """A prompt after which, with a seed, the answer soon ends by itself; and that seed."""
    for seed in range(60):
        answer = alone(lm, [7], 90, seed=seed, temperature=2.0)
        if answer.finish_reason == "stop" and answer.tokens:
            return [7], seed
    raise AssertionError("no seed ends")


def test_the_end_of_sequence_ends_an_answer_unless_ignored(lm: LM, served_model: tuple[str, Service]):
    prompt, seed = ending(lm)
    fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "temperature": 2.0, "max_tokens": 90, "return_token_ids": True}
    choice = post(served_model, **fields)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == lm.tokenizer.eos
    assert "<eos>" not in choice["text"]
    on = post(served_model, **fields, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert (on["finish_reason"], len(on["token_ids"])) == ("length", 90)
    assert on["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert "<eos>" in on["text"]


def test_echo_puts_the_prompt_in_front(lm: LM, served_model: tuple[str, Service]):
    expected = [PROMPT + alone(lm, most=3).text, "b" + alone(lm, "b", 3).text]
    fields = {"prompt": [PROMPT, "b"], "echo": True, "max_tokens": 3, "temperature": 0}
    assert [c["text"] for c in post(served_model, **fields)["choices"]] == expected
    chunks = events(served_model, **fields)
    assert ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)] == expected


def test_an_echo_of_ids_that_end_within_a_character_writes_it_once(lm: LM, served_model: tuple[str, Service]):
    prompt = [97, *"é".encode()[:1]]
    for forced, text in ((0xA9, "aé\N{REPLACEMENT CHARACTER}"), (98, "a\N{REPLACEMENT CHARACTER}bb")):
        fields: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": 2, "temperature": 0, "logit_bias": {str(forced): 100}}
        for more in ({}, {"logprobs": 0}):
            assert post(served_model, **fields, **more)["choices"][0]["text"] == text
            assert "".join(chunk["choices"][0]["text"] for chunk in events(served_model, **fields, **more)) == text
    whole = post(served_model, prompt=prompt, echo=True, max_tokens=0)
    assert whole["choices"][0]["text"] == "a\N{REPLACEMENT CHARACTER}"
    offsets = post(served_model, **fields, logprobs=0)["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:2] == [0, 1]


def test_cached_tokens_are_told_and_a_salt_hides_them(served_model: tuple[str, Service]):
    prompt = "the common beginning of two prompts, "

    def cached(**more: Any) -> int:
        body = post(served_model, prompt=prompt, max_tokens=2, n=2, **more)
        assert body["usage"]["prompt_tokens"] == len(prompt), "a prompt counts once"
        assert body["usage"]["completion_tokens"] == 4
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() == len(prompt) - 1
    assert cached(cache_salt="mine") == 0


def test_usage_may_come_with_every_chunk(served_model: tuple[str, Service]):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(served_model, prompt="a", max_tokens=4, temperature=0, logprobs=0, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 4]


def test_texts_and_tokens_convert_both_ways(served_model: tuple[str, Service]):
    body = post(served_model, "/tokenize", prompt="hé", return_token_strs=True)
    assert body == {"count": 3, "max_model_len": 128, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
    assert post(served_model, "/detokenize", tokens=body["tokens"]) == {"prompt": "hé"}
    talk = post(served_model, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert bytes(talk["tokens"]) == b"<user>hi<assistant>"


def test_lone_surrogates_of_a_client_do_no_harm(served_model: tuple[str, Service]):
    raw = b'{"prompt": "\\ud800", "max_tokens": 2, "echo": true}'
    answer = httpx.post(f"{served_model[0]}/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


# ---------------------------------------------------------------- in a crowd


def test_answers_in_a_crowd_are_those_alone(lm: LM, served_model: tuple[str, Service]):
    def ask(i: int) -> str:
        fields = {"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0}
        body = {"prompt": PROMPT[: 1 + i % 13] + str(i), "max_tokens": 5 + i % 9, **fields}
        if i % 3 == 0:
            return "".join(c["choices"][0]["text"] for c in events(served_model, **body))
        return post(served_model, **body)["choices"][0]["text"]

    with ThreadPoolExecutor(10) as threads:
        texts = list(threads.map(ask, range(20)))
    for i, text in enumerate(texts):
        fields = {"temperature": 0.9, "seed": i} if i % 2 else {}
        assert text == alone(lm, PROMPT[: 1 + i % 13] + str(i), 5 + i % 9, **fields).text


def resting(service: Service) -> bool:
    front = service.front
    return not front.opened and not front._rows and front._tasks.empty() and not front.engine.busy


def until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never happens")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(served_model: tuple[str, Service], stream: bool):
    address, service = served_model
    step, drawn = service.front.engine.step, service.front.engine.stats.drawn_tokens
    service.front.engine.step = lambda: (time.sleep(0.01), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
    body = json.dumps({"prompt": "a", "max_tokens": 120, "ignore_eos": True, "n": 4, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    url = httpx.URL(address)
    try:
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            until(lambda: service.front.engine.stats.drawn_tokens > drawn + 8)
            assert service.front.engine.pages.used > 0
        until(lambda: resting(service))
    finally:
        service.front.engine.step = step
    assert service.front.engine.pages.used == 0
    assert service.front.engine.stats.drawn_tokens < drawn + 480, "they were not answered to the end"


def test_a_dead_engine_ends_streams_with_an_error_and_health_says_so(lm: LM, capsys: pytest.CaptureFixture[str]):
    with serving(lm) as service, listening(service) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        step, count = service.front.engine.step, iter(range(8))

        def breaks() -> Any:
            if next(count, None) is None:
                raise RuntimeError("the device is gone")
            return step()

        service.front.engine.step = breaks  # pyright: ignore[reportAttributeAccessIssue]
        chunks = events((address, service), prompt="a", max_tokens=50, ignore_eos=True)
        assert chunks[0]["choices"]
        assert chunks[-1]["error"]["code"] == "engine_dead"
        for answer in (httpx.get(f"{address}/health"), httpx.post(f"{address}/v1/completions", json={"prompt": "a"})):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
    assert "the device is gone" in capsys.readouterr().err


def test_the_server_drains_before_it_ends(lm: LM):
    with serving(lm) as service:
        step = service.front.engine.step
        service.front.engine.step = lambda: (time.sleep(0.01), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
        with ThreadPoolExecutor(1) as thread:
            with listening(service) as address:
                whole = thread.submit(post, (address, service), prompt="a", max_tokens=30, ignore_eos=True)
                until(lambda: service.front.engine.stats.drawn_tokens > 3)
                client = httpx.Client(base_url=address)
                assert client.get("/load").json() == {"server_load": 1}
                # The block's end asks the server to stop, and waits for it.
            assert whole.result()["usage"]["completion_tokens"] == 30
            client.close()


def test_while_it_drains_the_server_refuses_and_is_not_healthy(lm: LM):
    with serving(lm) as service, listening(service) as address:
        service.front.draining = True
        for answer in (httpx.get(f"{address}/health"), httpx.post(f"{address}/v1/completions", json={"prompt": "a"})):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "shutting_down"


def test_a_slow_upload_is_ended(lm: LM):
    with serving(lm, LIMITS.model_copy(update={"upload_seconds": 0.2})) as service, listening(service) as address:
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            connection.settimeout(20)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_headers_of_many_bytes_are_refused(served_model: tuple[str, Service]):
    url = httpx.URL(served_model[0])
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 60_000 + b"\r\n\r\n")
        connection.settimeout(20)
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


def test_the_event_loop_is_free_while_a_template_is_rendered(lm: LM, monkeypatch: pytest.MonkeyPatch):
    with serving(lm) as service, listening(service) as address:
        monkeypatch.setattr(LM, "chat_prompt", lambda *_, **__: (time.sleep(0.5), [97])[1])

        async def go() -> list[str]:
            order = []
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:

                async def talk() -> None:
                    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                    order.append("chat")

                async def probe() -> None:
                    await asyncio.sleep(0.1)
                    assert (await client.get("/health")).status_code == 200
                    order.append("health")

                await asyncio.gather(talk(), probe())
            return order

        assert asyncio.run(go()) == ["health", "chat"]


def test_an_answer_that_repeats_itself_ends(ask: Callable[..., httpx.Response]):
    bias = {"logit_bias": {"97": 100}, "temperature": 0, "max_tokens": 20}
    detection = {"max_pattern_size": 2, "min_count": 3}
    body = ask("POST", "/v1/completions", json={"prompt": "x", "repetition_detection": detection} | bias).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("aaa", "repetition")
    off = ask("POST", "/v1/completions", json={"prompt": "x", "repetition_detection": {"max_pattern_size": 0}} | bias).json()
    assert off["choices"][0]["finish_reason"] == "length"
    for wrong in ({"max_pattern_size": 2, "min_count": 1}, {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}):
        answer = ask("POST", "/v1/completions", json={"prompt": "x", "repetition_detection": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_detection")
