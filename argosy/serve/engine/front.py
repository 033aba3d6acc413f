"""The front of an engine: one thread owns the engine and steps it, and coroutines open requests and await their tokens.

    async with front.open(requests) as answers:
        async for place, event in answers:
            ...                                 # place: the index of the request

The thread sleeps while there is nothing to do. It runs tasks of the event loop between two steps. So a request whose context is left is
aborted, and its pages are freed, before the next step. Each step reports to the event loop once, however many tokens it sampled. A slow
reader delays nobody: its events wait in a queue, whose length the context of the model bounds.

Log-probabilities of prompts (`open(requests, prompts)`, then `await answers.scored()`) are computed between two steps, one pass at a
time, so running completions wait for one pass at most. A long prompt takes several passes (`infer.prompt_logprobs`).

A beam search opens further requests once its earlier ones have ended (`open(requests, goes_on=True)`, then
`await answers.more(requests)`). It counts as one request from its first step to its last. So a drain waits for it, and so does a pause
that lets requests finish.

While the front is paused, the engine makes no step. Requests may be opened and closed meanwhile, and wait. `call` runs other functions
in the thread between two steps, such as those that replace weights or load adapters.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.engine.adapters import UnknownAdapter
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.prompt_logprobs import NOTHING, PromptScorer, PromptScores
from argosy.serve.engine.admission import Computing, engine_died_error, timed_out
from argosy.serve.metrics import EngineMetrics
from argosy.serve.response.streams import EventStreams, RequestRow, StepNews, StreamPart
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError, input_error, unknown_model

R = TypeVar("R")
PauseMode = Literal["abort", "wait", "keep"]


class Front(Computing[EventStreams, EngineMetrics]):
    """The thread that runs an engine, and admission to it.

    Args:
        metrics: the metrics to update.
    """

    def __init__(self, engine: Engine, limits: ServerLimits, metrics: EngineMetrics):
        super().__init__(limits, metrics)
        self.engine = engine
        self.prompts = PromptScorer(engine.model, min(limits.prompt_logprobs_tokens, engine.context), engine.say, engine.adapters)
        metrics.prompts = self.prompts
        # Rows that have begun and have not ended.
        self.running = 0
        self._rows: dict[int, RequestRow] = {}
        # Prompts to be scored, in the order of arrival: the request, the prompt's index in the request, and its ids.
        self._unscored: list[tuple[EventStreams, int, Sequence[int]]] = []
        self._scores: dict[EventStreams, dict[int, PromptScores]] = {}
        # Only the thread uses these. While holding, new requests wait in `_held`, because a pause lets only earlier ones finish.
        self._paused, self._holding = False, False
        self._held: list[EventStreams] = []
        self._emptied: Future[None] | None = None
        # Beam searches that may open further requests.
        self._searches: set[EventStreams] = set()

    # ---------------------------------------------------------------- the event loop's side

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines of the server; here only one."""
        return [self.engine]

    @property
    def load(self) -> int:
        """The load of this engine. As in vLLM, a waiting sequence counts as four running ones."""
        return 4 * self.waiting + self.running

    def described(self) -> str:
        """Describes the size of the cache as text."""
        return self.engine.runner.describe_cache()

    def says(self, say: Say | None) -> None:
        """Sets the function that is called with the name of a program that is being compiled, if that takes longer than a second."""
        self.engine.say = say

    @asynccontextmanager
    async def open(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]] = (),
        names: Sequence[str] = (),
        adapter: str | None = None,
        part: StreamPart | None = None,
        *,
        goes_on: bool = False,
    ) -> AsyncIterator[EventStreams]:
        """Hands all requests to the engine, or none of them. Leaving the context aborts those that have not ended.

        Args:
            prompts: prompts to be scored, each with at most `self.prompts.longest` token ids.
            names: the ids by which `abort` may name these requests.
            adapter: the name of the adapter under which the prompts are scored; None: the model alone.
            part: describes which part of a client's requests these are, if other fronts run the rest; None: these are all.
            goes_on: whether `EventStreams.more` will be called.

        Raises:
            ApiError: the engine refuses a request, too many wait already, the server is shutting down, or the engine has died.
        """
        self._loop = asyncio.get_running_loop()
        scoring, tokens = len(prompts), sum(map(len, prompts))
        self._check([*(len(r.tokens) for r in requests), *map(len, prompts)])
        answers = EventStreams(self, requests, prompts, names, adapter, part, goes_on=goes_on)
        self.opened.add(answers)
        self.waiting += scoring
        self.waiting_tokens += tokens

        def scored(_: Any) -> None:
            self.waiting -= scoring
            self.waiting_tokens -= tokens

        if prompts:
            answers.scores.add_done_callback(scored)
        overdue = self._loop.call_later(self.limits.seconds, answers.fail, timed_out(self.limits.seconds))
        try:
            await self.admit(answers)
            yield answers
        finally:
            overdue.cancel()
            for row in answers.rows:
                if not row.done:
                    self.end(row, "abort")
            if prompts or goes_on:
                self._tasks.put(lambda: self._leave(answers))
            answers.scores.cancel()
            self._closed(answers)

    async def admit(self, answers: EventStreams) -> None:
        """Adds all engine requests of `answers` to the engine. If the engine refuses one, none is added.

        Raises:
            ApiError: the engine refuses one of them, or has died.
        """
        self.waiting += len(answers.rows)
        self.waiting_tokens += sum(len(row.request.tokens) for row in answers.rows)
        added: Future[None] = Future()
        self._tasks.put(lambda: self._add(answers, added))
        try:
            await asyncio.wrap_future(added)
        except BadInput as error:
            for row in answers.rows:
                self._begin(row, answers.arrived)
                self._done(row)
            if isinstance(error, UnknownAdapter):
                adapter = answers.adapter or next((row.request.adapter for row in answers.rows), None)
                raise unknown_model(adapter or "") from None
            raise input_error(error) from None

    def end(self, row: RequestRow, reason: str) -> None:
        """Ends a row early. The engine drops it before its next step."""
        # The row is finished first, so that the thread does not add it to the engine if it is held.
        self._finish(row, reason, time.monotonic())
        self._tasks.put(lambda: self._abort(row))

    async def call(self, work: Callable[[Engine], R]) -> R:
        """Runs a function in the engine's thread, between two steps.

        Raises:
            ApiError: the engine has died. Errors of `work` are passed on.
        """
        self._loop = asyncio.get_running_loop()
        future: Future[R] = Future()

        def task() -> None:
            try:
                if self.failure is not None:
                    raise engine_died_error()
                future.set_result(work(self.engine))
            except Exception as error:
                future.set_exception(error)

        self._tasks.put(task)
        # `work` runs even if the caller is cancelled.
        return await asyncio.shield(asyncio.wrap_future(future))

    async def together(self, work: Callable[[Sequence[Engine]], R]) -> R:
        """Runs a function that changes every engine of the server; here only one."""
        return await self.call(lambda engine: work([engine]))

    def park(self, released: threading.Event) -> "Future[None]":
        """Stops the thread between two steps until `released` is set. The returned future completes when the thread has stopped, and
        fails if the engine has died.
        """
        parked: Future[None] = Future()

        def task() -> None:
            if not parked.set_running_or_notify_cancel():
                return
            if self.failure is not None:
                parked.set_exception(engine_died_error())
            else:
                parked.set_result(None)
                released.wait()

        self._tasks.put(task)
        return parked

    async def pause(self, mode: PauseMode) -> None:
        """Stops the engine after the current step, until `resume`. Requests that arrive meanwhile wait.

        Args:
            mode: the treatment of open requests: `abort` ends them, `wait` lets them finish first, `keep` keeps them waiting.

        Raises:
            ApiError: the engine has died, or `resume` was called before the running requests had finished.
        """
        if mode == "abort":
            self.abort()
        emptied = await self.call(lambda _: self._pause(mode == "wait"))
        if emptied is not None:
            await asyncio.shield(asyncio.wrap_future(emptied))
        if self.failure is not None:
            raise engine_died_error()
        if not self._paused:
            raise ApiError("the pause was ended before it began", status=409)

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self.call(lambda _: self._resume())

    @property
    def paused(self) -> bool:
        return self._paused

    def abort(self, names: Collection[str] | None = None) -> int:
        """Ends the client requests with these names; None: all. Their clients get the tokens so far. Returns the number of requests."""
        requests = [request for request in self.opened if names is None or not set(names).isdisjoint(request.names)]
        for request in requests:
            request.abort()
        return len(requests)

    def _take(self, news: StepNews) -> None:
        """Hands the events of a step to the readers of the requests, in the event loop."""
        for row, reused in news.began:
            if row.began is None and not row.done:
                row.reused = reused
                self._begin(row, news.now)
                self.metrics.admitted(len(row.request.tokens), reused, news.now - row.answers.arrived)
        for row, event in news.events:
            if row.done:
                continue
            if event.token is not None:
                row.sampled += 1
                self.metrics.generated_tokens.inc()
                # Speculation and `engine.steps` return several tokens at once. As in vLLM, only the first of them is timed.
                if row.last != news.now:
                    since = self.metrics.first_token if row.last is None else self.metrics.between
                    since.observe(news.now - (row.answers.arrived if row.last is None else row.last))
                row.last = news.now
            if event.finish_reason is not None:
                self._finish(row, event.finish_reason, news.now)
            row.answers.news.put_nowait((row.place, event))

    def _begin(self, row: RequestRow, now: float) -> None:
        """Counts a row as running, no longer as waiting."""
        row.began = now
        self.running += 1
        self.waiting -= 1
        self.waiting_tokens -= len(row.request.tokens)

    def _finish(self, row: RequestRow, reason: str, now: float) -> None:
        if row.began is None:
            self._begin(row, now)
        self._done(row)
        self.metrics.answered(reason, row.sampled, now - row.answers.arrived)

    def _done(self, row: RequestRow) -> None:
        row.done = True
        self.running -= 1

    # ---------------------------------------------------------------- the thread's side

    def _work(self) -> None:
        while True:
            task = None
            while self._rests() or not self._tasks.empty():
                if (task := self._tasks.get()) is None:
                    return
                task()
            try:
                if self.engine.busy:
                    self._report(self.engine.step())
                if self._unscored:
                    self._score()
            except Exception as error:
                self._failed(error)

    def _rests(self) -> bool:
        """Whether the thread has no step to make. Completes a pause that waited for requests to finish."""
        idle = self.failure is not None or not (self.engine.busy or self._unscored)
        if self._emptied is not None and idle and not self._searches:
            self._paused = True
            self._emptied.set_result(None)
            self._emptied = None
        return idle or self._paused

    def _pause(self, waits: bool) -> "Future[None] | None":
        """Pauses at once and returns None. If `waits`, returns a future that completes once running requests have finished and the
        front is paused."""
        if not waits or self._paused:
            self._paused = True
            return None
        self._holding = True
        self._emptied = self._emptied or Future()
        return self._emptied

    def _resume(self) -> None:
        self._paused, self._holding = False, False
        if self._emptied is not None:
            self._emptied.set_result(None)
            self._emptied = None
        waiting, self._held = self._held, []
        for answers in waiting:
            try:
                self._enter(answers)
            except Exception as error:
                refusal = input_error(error) if isinstance(error, BadInput) else engine_died_error()
                self._tell(lambda answers=answers, refusal=refusal: answers.fail(refusal))

    def _add(self, answers: EventStreams, added: "Future[None]") -> None:
        if not added.set_running_or_notify_cancel():
            return
        try:
            if self.failure is not None:
                raise engine_died_error()
            # A beam search that has begun is finished before the pause, as other requests are.
            if self._holding and not answers.entered:
                self._held.append(answers)
            else:
                self._enter(answers)
        except Exception as error:
            added.set_exception(error)
        else:
            added.set_result(None)

    def _enter(self, answers: EventStreams) -> None:
        """Adds all rows that have not ended to the engine, or none of them if it refuses one."""
        done: list[RequestRow] = []
        try:
            for row in answers.rows:
                if not row.done:
                    row.number = self.engine.add(row.request)
                    self._rows[row.number] = row
                    done.append(row)
            if answers.prompts and not answers.entered and not answers.scores.done():
                self._await_scores(answers)
        except Exception:
            for row in done:
                self._abort(row)
            raise
        answers.entered = True
        if answers.goes_on:
            self._searches.add(answers)

    def _await_scores(self, answers: EventStreams) -> None:
        if (adapters := self.engine.adapters) is not None and answers.adapter is not None:
            # The adapter keeps its place in the bank until all prompts are scored, even if it is unloaded or replaced meanwhile.
            answers.under = adapters.get(answers.adapter)
            adapters.use(answers.under)
        self._scores[answers] = {}
        # A prompt of one token has nothing to score.
        for place, ids in enumerate(answers.prompts):
            if len(ids) > 1:
                self._unscored.append((answers, place, ids))
            else:
                self._scores[answers][place] = NOTHING
        self._hand_over(answers)

    def _score(self) -> None:
        """Runs one pass over the prompts that have waited longest."""
        waiting = self._unscored
        places = self.prompts.batch([ids for _, _, ids in waiting], [answers.under for answers, _, _ in waiting])
        batch = [waiting[i] for i in places]
        readers = {answers for answers, _, _ in batch}
        try:
            scores = self.prompts.score([ids for _, _, ids in batch], batch[0][0].under)
        except Exception:
            # Only these requests fail, because the state of the engine is not changed.
            traceback.print_exc(file=sys.stderr)
            for answers in readers:
                self._leave(answers)
                self._tell(lambda answers=answers: answers.fail(ApiError("internal error", status=500)))
            return
        if scores is None:
            return
        self._unscored = [entry for i, entry in enumerate(self._unscored) if i not in places]
        for (answers, place, _), prompt_scores in zip(batch, scores, strict=True):
            self._scores[answers][place] = prompt_scores
        for answers in readers:
            self._hand_over(answers)

    def _hand_over(self, answers: EventStreams) -> None:
        """Hands a request the scores of its prompts, if all are there."""
        scores_by_place = self._scores[answers]
        if len(scores_by_place) == len(answers.prompts):
            self._end_scores(answers)
            scores = [scores_by_place[place] for place in range(len(scores_by_place))]
            self._tell(lambda: None if answers.scores.done() else answers.scores.set_result(scores))

    def _leave(self, answers: EventStreams) -> None:
        """Drops the prompts and the beam search of a client request that has ended."""
        self._searches.discard(answers)
        self._held = [reader for reader in self._held if reader is not answers]
        self._unscored = [entry for entry in self._unscored if entry[0] is not answers]
        self._end_scores(answers)
        self.prompts.forget(answers.prompts)

    def _end_scores(self, answers: EventStreams) -> None:
        if self._scores.pop(answers, None) is not None and self.engine.adapters is not None:
            self.engine.adapters.leave(answers.under)

    def _abort(self, row: RequestRow) -> None:
        if self._rows.pop(row.number, None) is not None and self.failure is None:
            self.engine.end(row.number)

    def _report(self, events: list[Event]) -> None:
        now = time.monotonic()
        admitted: list[tuple[RequestRow, int]] = []
        for sequence in self.engine.scheduler.running:
            row = self._rows.get(sequence.id)
            if row is not None and not row.admitted:
                row.admitted = True
                admitted.append((row, sequence.reused))
        mine = [(row, event) for event in events if event.finish_reason != "abort" and (row := self._rows.get(event.id))]
        for row, event in mine:
            if not row.admitted:
                # The row has begun and ended within this step.
                row.admitted = True
                admitted.append((row, event.reused))
            if event.finish_reason is not None:
                del self._rows[event.id]
        if admitted or mine:
            self._tell(lambda: self._take(StepNews(now, admitted, mine)))
