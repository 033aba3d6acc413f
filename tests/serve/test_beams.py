"""Beam search over HTTP: the answers of `lm.beam_search`, beside other requests, as one request of its client."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from serve.conftest import LIMITS, SIZES, inside, serving
from serve.test_front import PROMPT, forever, until_settled
from serve.test_several_copies import serving as serving_copies

from argosy.infer.completions import Completion
from argosy.infer.lm import LM
from argosy.serve.app import App
from argosy.serve.openai import completions
from argosy.serve.response.writer import GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError

Ask = Callable[..., httpx.Response]
SEARCH = {"use_beam_search": True, "n": 3, "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def expected(lm: LM) -> dict[tuple[str, float], list[Completion]]:
    """What `lm.beam_search` finds, by text and length penalty."""
    completions = {}
    for penalty in (1.0, 0.0):
        beams = lm.beam_search(["It was", "a dark night"], 5, beam_width=3, length_penalty=penalty)
        completions |= {("It was", penalty): beams[0], ("a dark night", penalty): beams[1]}
    return completions


def test_completions_are_those_of_the_library(ask: Ask, expected: dict[tuple[str, float], list[Completion]]):
    """Several prompts, an echo, and the log-probabilities of prompts too."""
    for penalty, more in ((1.0, {}), (0.0, {"echo": True, "prompt_logprobs": 1})):
        prompts = ["It was", "a dark night"]
        body = SEARCH | {"prompt": prompts, "logprobs": 2, "length_penalty": penalty}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True} | more
        answer = ask("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        beams = [(prompt, beam) for prompt in prompts for beam in expected[prompt, penalty]]
        for choice, (prompt, beam) in zip(choices, beams, strict=True):
            before = len(prompt) if more else 0
            assert choice["text"][before:] == beam.text
            ended = [] if beam.stopped_by is None else [beam.stopped_by]
            assert choice["token_ids"] == [*beam.tokens, *ended]
            assert choice["finish_reason"] == beam.finish_reason
            logprobs = choice["logprobs"]["token_logprobs"][before : before + len(beam.tokens)]
            np.testing.assert_allclose(logprobs, beam.logprobs, rtol=1e-4)
            assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"][before:])
            assert ("prompt_logprobs" in choice) == bool(more)
        count = sum(len(choice["token_ids"]) for choice in choices)
        assert answer.json()["usage"]["completion_tokens"] == count


def test_chats_are_answered_by_beams(lm: LM, ask: Ask):
    messages = [{"role": "user", "content": "It was"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 4, **SEARCH, "n": 2}
    answer = ask("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [beams] = lm.beam_search([lm.chat_prompt(messages)], 5, beam_width=2)
    choices = answer.json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [beam.text for beam in beams]
    for choice, beam in zip(choices, beams, strict=True):
        content = choice["logprobs"]["content"]
        np.testing.assert_allclose([entry["logprob"] for entry in content][: len(beam.tokens)], beam.logprobs, rtol=1e-4)
        assert {len(entry["top_logprobs"]) for entry in content} == {4}
        # A beam may go on with any of the 2n likeliest tokens, and they are told in descending order.
        for entry in content:
            top = [other["logprob"] for other in entry["top_logprobs"]]
            assert top == sorted(top, reverse=True)
            assert entry["logprob"] <= top[0]


def test_tokens_that_end_an_answer_are_those_of_the_request(lm: LM, ask: Ask):
    first = lm.beam_search(["It was"], 5, beam_width=1)[0][0].tokens[1]
    body = SEARCH | {"prompt": "It was", "stop_token_ids": [first], "return_token_ids": True, "ignore_eos": True}
    [beams] = lm.beam_search(["It was"], 5, beam_width=3, stop_tokens=[first], ignore_eos=True)
    choices = ask("POST", "/v1/completions", json=body).json()["choices"]
    assert [choice["stop_reason"] for choice in choices] == [beam.stopped_by for beam in beams]
    assert first in [choice["stop_reason"] for choice in choices]
    included = ask("POST", "/v1/completions", json=body | {"include_stop_str_in_output": True}).json()["choices"]
    longer = [len(a["text"]) > len(b["text"]) for a, b in zip(included, choices, strict=True)]
    assert longer == [choice["stop_reason"] == first and bool(lm.tokenizer.decode([first])) for choice in choices]


def test_each_step_finds_its_beams_in_the_prefix_cache(service: Service, ask: Ask):
    prompt = list(range(60, 100))
    before = service.front.engine.stats.prompt_tokens
    answer = ask("POST", "/v1/completions", json=SEARCH | {"prompt": prompt})
    assert answer.status_code == 200
    computed = service.front.engine.stats.prompt_tokens - before
    # 13 requests: the prompt once, then at most a page and the answer so far for each.
    assert computed <= len(prompt) + 12 * (SIZES.page + 5)
    again = ask("POST", "/v1/completions", json=SEARCH | {"prompt": prompt})
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
    assert again.json()["choices"] == answer.json()["choices"]


REFUSED = [
    ({"stream": True}, "stream"),
    ({"temperature": 0.5}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"min_tokens": 1}, "min_tokens"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"stop": ["x"]}, "stop"),
    ({"repetition_detection": {"max_pattern_size": 3, "min_count": 3}}, "repetition_detection"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"best_of": 3}, "best_of"),
    ({"n": 11}, "n"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
    ({"use_beam_search": 1}, "use_beam_search"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_what_a_search_cannot_honor_is_refused_by_name(ask: Ask, more: dict[str, Any], param: str):
    talk = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", talk)):
        answer = ask("POST", path, json=body | SEARCH | more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_values_that_ask_for_nothing_are_accepted(ask: Ask):
    neutral = {
        "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "seed": 3, "stop": [], "stream": False,
        "logit_bias": {}, "best_of": 1, "min_tokens": 0,
    }  # fmt: skip
    plain = {"prompt": "It was", "use_beam_search": True, "n": 2, "max_tokens": 2}
    answer = ask("POST", "/v1/completions", json=plain | neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == ask("POST", "/v1/completions", json=plain).json()["choices"]
    off = ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1, "use_beam_search": False, "length_penalty": 1})
    assert off.status_code == 200


# ---------------------------------------------------------------- one request of its client


def job(service: Service, most: int = 60, **more: Any) -> GenerationJob:
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": most, "ignore_eos": True}
    return completions.prepare_completions(service, body | more)


async def begin_search(service: Service, job: GenerationJob) -> asyncio.Task[Any]:
    """A search that has made some steps."""
    task = asyncio.create_task(job.answered())
    while len(job.searches[0].beams.open[0].tokens if job.searches[0].beams.open else ()) < 3:
        assert not task.done()
        await asyncio.sleep(0.001)
    return task


def test_other_requests_go_on_beside_a_search(service: Service):
    async def go() -> tuple[bool, int]:
        searching = await begin_search(service, job(service))
        async with service.front.open(forever(2)) as answers:
            for _ in range(10):
                await anext(answers)
            running = not searching.done()
        return running, len((await searching)["choices"])

    assert asyncio.run(go()) == (True, 2)


def test_a_client_that_leaves_ends_its_search(service: Service):
    async def go() -> int:
        searching = await begin_search(service, job(service))
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        await until_settled(service.front)
        drawn = service.front.engine.stats.drawn_tokens
        await asyncio.sleep(0.1)
        return service.front.engine.stats.drawn_tokens - drawn

    assert asyncio.run(go()) == 0
    assert service.front.engine.pages.used == 0
    assert not service.front.opened
    assert not service.front._searches
    assert service.front.queue == (0, 0)
    assert service.front.load == 0


def test_a_search_is_admitted_once_and_counts_as_one_request(lm: LM):
    """Its later steps are not refused because others wait meanwhile."""
    with serving(lm, LIMITS.model_copy(update={"queue": 1})) as service:
        front = service.front

        async def go() -> tuple[int, int]:
            searching = await begin_search(service, job(service, 20))
            count = len(front.opened)
            front.waiting += 5
            opening = front.open(forever(1))
            with pytest.raises(ApiError, match="too many"):
                await opening.__aenter__()
            choice_count = len((await searching)["choices"])
            front.waiting -= 5
            return count, choice_count

        assert asyncio.run(go()) == (1, 2)


def test_a_drain_waits_for_a_search(lm: LM):
    with serving(lm) as service:

        async def go() -> list[str]:
            searching = await begin_search(service, job(service, 20))
            draining = asyncio.create_task(service.front.drain(60))
            choices = (await searching)["choices"]
            await draining
            return [choice["finish_reason"] for choice in choices]

        assert asyncio.run(go()) == ["length", "length"]


def test_a_pause_that_waits_lets_a_search_finish_first(service: Service):
    front = service.front

    search = job(service, 20)

    async def go() -> list[bool]:
        searching = await begin_search(service, search)
        await front.pause("wait")
        done = not search.searches[0].beams.open
        await asyncio.wait_for(searching, 5)
        await front.resume()
        return [done, front.paused]

    assert asyncio.run(go()) == [True, False]


def test_an_aborted_search_answers_with_what_it_has(service: Service):
    async def go() -> Any:
        searching = await begin_search(service, job(service, 60, request_id="mine"))
        assert service.front.abort(["mine"]) == 1
        body = await searching
        # Its reader is told at once, the engine at its next step.
        await until_settled(service.front)
        return body

    choices = asyncio.run(go())["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert service.front.engine.pages.used == 0


def test_a_search_that_takes_too_long_ends_with_an_error(lm: LM):
    with serving(lm, LIMITS.model_copy(update={"seconds": 0.3})) as service:
        step = service.front.engine.step

        async def go() -> None:
            with pytest.raises(ApiError, match="more than") as error:
                await job(service).answered()
            assert error.value.status == 504
            service.front.engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
            await until_settled(service.front)

        service.front.engine.step = lambda: (time.sleep(0.02), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
        asyncio.run(go())


@pytest.mark.slow
def test_a_search_stays_on_one_copy_and_searches_are_spread(lm: LM, expected: dict[tuple[str, float], list[Completion]]):
    with serving_copies(lm, 2) as service:
        front: Any = service.front

        async def go(client: httpx.AsyncClient) -> Any:
            body = SEARCH | {"prompt": ["It was", "a dark night"], "return_token_ids": True, "prompt_logprobs": 1}
            answer = (await client.post("/v1/completions", json=body)).json()
            async with front.open([*forever(1)]) as answers:
                assert [len(front.opened) for front in front.fronts] == [1, 0], "each copy has had its turn"
                await anext(answers)
            return answer["choices"]

        choices = inside(App(service).asgi, go)
        drawn = [engine.stats.drawn_tokens for engine in front.engines]
    beams = [beam for prompt in ("It was", "a dark night") for beam in expected[prompt, 1.0]]
    assert [choice["text"] for choice in choices] == [beam.text for beam in beams]
    assert min(drawn) >= 5, "five steps each"
