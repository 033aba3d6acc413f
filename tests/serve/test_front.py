"""The engine's thread: who leaves frees pages, who is slow delays nobody, and what breaks is told."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from serve.conftest import LIMITS, SIZES, alone, serving

from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.infer.settings import DraftModel, NGram
from argosy.serve.engine.front import Front
from argosy.serve.response.streams import EventStreams
from argosy.serve.service import Service
from argosy.web.errors import ApiError

PROMPT = list(b"It was a dark and stormy night")


def forever(n: int = 1) -> list[Request]:
    """Requests that run until the context is full."""
    return [Request([*PROMPT, i], 90) for i in range(n)]


async def tokens(answers: EventStreams) -> dict[int, list[int]]:
    tokens_by_place: dict[int, list[int]] = {row.place: [] for row in answers.rows}
    async for place, event in answers:
        tokens_by_place[place].append(event.token)
    return tokens_by_place


async def until_settled(front: Front) -> None:
    """Returns when the engine's thread has done what it was told, and sleeps."""
    for _ in range(600):
        if front._tasks.empty() and not front.engine.busy:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the engine does not come to rest")


@pytest.mark.slow
def test_each_answer_is_that_of_the_model_alone(lm: LM, service: Service):
    async def go() -> dict[int, list[int]]:
        async with service.front.open(forever(3)) as answers:
            return await tokens(answers)

    tokens_of_place = asyncio.run(go())
    expected = [alone(lm, request.tokens, 90, ends=frozenset()) for request in forever(3)]
    assert [tokens_of_place[place] for place in range(3)] == [completion.tokens for completion in expected]


def test_leaving_an_answer_frees_its_pages_before_the_next_step(service: Service):
    front, steps = service.front, []
    step = front.engine.step
    front.engine.step = lambda: (steps.append(front.engine.pages.used), step())[1]  # pyright: ignore[reportAttributeAccessIssue]

    async def go() -> None:
        async with front.open(forever()) as answers:
            await anext(answers)
            assert front.engine.pages.used > 0
        steps_when_left.append(len(steps))
        await until_settled(front)

    steps_when_left: list[int] = []
    try:
        asyncio.run(go())
    finally:
        front.engine.step = step
    assert front.engine.pages.used == 0
    # The step under way when the reader left, and one to read what it sampled.
    assert len(steps) <= steps_when_left[0] + 2
    assert not front._rows


def test_a_cancelled_reader_frees_pages(service: Service):
    async def go() -> None:
        async def read() -> None:
            async with service.front.open(forever(4)) as answers:
                await anext(answers)
                started.set()
                await tokens(answers)

        started = asyncio.Event()
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_settled(service.front)

    before = service.front.engine.stats.drawn_tokens
    asyncio.run(go())
    assert service.front.engine.stats.drawn_tokens < before + 180, "half of what they asked for"
    assert service.front.engine.pages.used == 0
    assert not service.front.opened
    assert (service.front.waiting, service.front.waiting_tokens) == (0, 0)


def test_a_reader_cancelled_before_admission_leaves_nothing(service: Service):
    async def go() -> None:
        async def read() -> None:
            async with service.front.open(forever(4)):
                raise AssertionError("was admitted")

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_settled(service.front)

    asyncio.run(go())
    assert not service.front._rows
    assert service.front.waiting == 0


def test_a_slow_reader_does_not_stop_others(service: Service):
    async def go() -> int:
        async with service.front.open(forever()) as slow:
            await anext(slow)
            async with service.front.open(forever(3)) as others:
                await tokens(others)
            # Its tokens wait for it.
            return len((await tokens(slow))[0])

    assert asyncio.run(go()) == 89


def test_a_row_that_is_ended_early_has_no_more_events_though_they_wait(service: Service):
    async def go() -> list[int]:
        async with service.front.open(forever(2)) as answers:
            while answers.news.qsize() < 20:
                await asyncio.sleep(0.01)
            answers.end(0, "stop")
            return [place async for place, _ in answers]

    assert asyncio.run(go()) == [1] * 90


def test_the_thread_sleeps_while_there_is_nothing_to_do(service: Service):
    before = service.front.engine.stats.steps
    calls: list[int] = []
    step = service.front.engine.step
    service.front.engine.step = lambda: (calls.append(1), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        asyncio.run(asyncio.sleep(0.2))
    finally:
        service.front.engine.step = step
    assert not calls
    assert service.front.engine.stats.steps == before


def test_all_requests_are_added_or_none(service: Service):
    async def go() -> None:
        with pytest.raises(ApiError, match="outside the model's vocabulary"):
            async with service.front.open([*forever(2), Request([9999], 5)]):
                raise AssertionError("was admitted")
        await until_settled(service.front)

    asyncio.run(go())
    assert service.front.engine.pages.used == 0
    assert not service.front._rows
    assert (service.front.waiting, service.front.waiting_tokens) == (0, 0)


@pytest.mark.parametrize("limits", [{"queue": 2}, {"queue_tokens": 40}])
def test_too_many_that_wait_are_refused_and_come_in_later(lm: LM, limits: dict[str, Any]):
    with serving(lm, LIMITS.model_copy(update=limits)) as service:

        async def go() -> ApiError:
            async with service.front.open(forever(4)) as running:
                while service.front.waiting:
                    await anext(running)
                async with service.front.open(forever(1)):
                    with pytest.raises(ApiError) as refused:
                        async with service.front.open(forever(2)):
                            raise AssertionError("was admitted")
            async with service.front.open(forever(1)) as later:
                await anext(later)
            return refused.value

        error = asyncio.run(go())
    assert (error.status, error.code) == (503, "queue_full")
    assert error.headers == {"retry-after": "1"}


def test_a_request_that_takes_too_long_ends_with_an_error(lm: LM):
    with serving(lm, LIMITS.model_copy(update={"seconds": 0.3})) as service:
        step = service.front.engine.step

        async def go() -> ApiError:
            async with service.front.open(forever()) as answers:
                with pytest.raises(ApiError) as late:
                    await tokens(answers)
            await until_settled(service.front)
            return late.value

        service.front.engine.step = lambda: (time.sleep(0.02), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
        assert asyncio.run(go()).status == 504
        assert service.front.engine.pages.used == 0


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(lm: LM):
    with serving(lm) as service:

        async def go() -> int:
            async with service.front.open(forever()) as answers:
                await anext(answers)
                draining = asyncio.create_task(service.front.drain(60))
                await asyncio.sleep(0)
                with pytest.raises(ApiError, match="shutting down"):
                    async with service.front.open(forever()):
                        raise AssertionError("was admitted")
                count = len((await tokens(answers))[0])
            await draining
            return count

        assert asyncio.run(go()) == 89


def test_a_drain_ends_what_takes_too_long(lm: LM):
    with serving(lm) as service:

        async def go() -> None:
            async with service.front.open(forever()) as answers:
                await anext(answers)
                await service.front.drain(0)
                with pytest.raises(ApiError, match="shutting down"):
                    await tokens(answers)
            await until_settled(service.front)

        asyncio.run(go())
        assert service.front.engine.pages.used == 0


def breaks(when: int) -> Callable[[], Any]:
    count = iter(range(when))

    def step() -> list[Any]:
        if next(count, None) is None:
            raise RuntimeError("the device is gone")
        return []

    return step


def test_an_engine_that_died_ends_all_answers_and_refuses_new_ones(lm: LM, capsys: pytest.CaptureFixture[str]):
    with serving(lm) as service:
        service.front.engine.step = breaks(2)  # pyright: ignore[reportAttributeAccessIssue]

        async def go() -> list[ApiError]:
            errors = []
            for _ in range(2):
                with pytest.raises(ApiError) as error:
                    async with service.front.open(forever()) as answers:
                        await tokens(answers)
                errors.append(error.value)
            return errors

        assert {(e.status, e.code) for e in asyncio.run(go())} == {(503, "engine_dead")}
    assert "the device is gone" in capsys.readouterr().err


def test_drafts_are_counted_as_vllm_counts_them(lm: LM):
    """The draft model is the model itself: after the prompt's step, one step makes four tokens and the next three."""
    sizes = SIZES.model_copy(update={"speculative": DraftModel(model="itself", tokens=3)})
    with serving(lm, sizes=sizes, draft=lm.module) as service:

        async def go() -> list[int]:
            async with service.front.open([Request(PROMPT, 8)]) as answers:
                return (await tokens(answers))[0]

        assert asyncio.run(go()) == alone(lm, PROMPT, 8, ends=frozenset()).tokens
        text = service.front.metrics.text().decode()
    labels = 'engine="0",model_name="tiny"'
    for name, value in {"drafts": 2, "draft_tokens": 5, "accepted_tokens": 5}.items():
        assert f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0" in text
    for at, value in enumerate((2, 2, 1)):
        assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {value}.0' in text
    assert f"vllm:generation_tokens_total{{{labels}}} 8.0" in text
    assert f"vllm:inter_token_latency_seconds_count{{{labels}}} 2.0" in text


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_an_answer_that_begins_and_ends_within_a_step_counts_as_any_other(lm: LM, drafts: bool):
    """With drafts, a step is read before the next is planned."""
    sizes = SIZES.model_copy(update={"speculative": NGram()}) if drafts else SIZES
    # Pages in which prompts end are copied without drafts only.
    reused = len(PROMPT) // SIZES.page * SIZES.page if drafts else len(PROMPT) - 1
    with serving(lm, sizes=sizes) as service:

        async def go() -> int:
            async with service.front.open([Request(PROMPT, 1)]) as answers:
                assert len((await tokens(answers))[0]) == 1
                return answers.reused(0)

        assert [asyncio.run(go()) for _ in range(2)] == [0, reused]
        text = service.front.metrics.text().decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:prompt_tokens_total{labels} {2 * len(PROMPT)}.0" in text
    assert f"vllm:prompt_tokens_cached_total{labels} {reused}.0" in text
    assert f"vllm:request_queue_time_seconds_count{labels} 2.0" in text
    assert (service.front.running, service.front.waiting, service.front.waiting_tokens) == (0, 0, 0)


def test_tokens_are_counted_once(lm: LM):
    with serving(lm) as service:

        async def go(request: Request) -> list[int]:
            async with service.front.open([request]) as answers:
                return (await tokens(answers))[0]

        asyncio.run(go(Request(PROMPT, 3)))
        asyncio.run(go(Request(PROMPT, 5, Sampling(temperature=1.0))))
        text = service.front.metrics.text().decode()
    for line in (
        "vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 60.0",
        "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"tiny\"} 29.0",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 8.0",
        "vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"tiny\"} 2.0",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"tiny\"} 2.0",
        "vllm:inter_token_latency_seconds_count{engine=\"0\",model_name=\"tiny\"} 6.0",
        "vllm:e2e_request_latency_seconds_count{engine=\"0\",model_name=\"tiny\"} 2.0",
        "vllm:request_queue_time_seconds_count{engine=\"0\",model_name=\"tiny\"} 2.0",
        "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 0.0",
        "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.0",
    ):
        assert line in text
