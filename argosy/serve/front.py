"""The front of the engine: one thread owns the engine and steps it, coroutines open requests and await their tokens.

    async with front.open(requests) as answers:
        async for place, event in answers:
            ...                                 # place: which of the requests

The thread sleeps while there is nothing to do. Everything it is told to do runs between two steps, so a request that is left is
aborted before the next one, and its pages are free by then. A step reports to the event loop once, however many tokens it made.
A reader that is slow delays nobody: its events wait in a queue, which the context of the model bounds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass

from argosy.core.errors import BadInput
from argosy.infer.engine import Engine, Event, Request
from argosy.serve.admission import Admission, died, timed_out
from argosy.serve.errors import ApiError, of_input
from argosy.serve.metrics import EngineMetrics
from argosy.serve.settings import Limits


@dataclass(eq=False)
class Row:
    """One request of the engine. The thread writes `number` and `admitted`, the event loop everything else.

    number: the engine's. admitted: it takes part in steps. began, last: when it did first, when its last token came. reused: prompt
    tokens found in the prefix cache. made: tokens of the answer. done: it has ended. left: its reader wants no more of it.
    """

    place: int
    request: Request
    answers: "Answers"
    number: int = -1
    admitted: bool = False
    began: float | None = None
    last: float | None = None
    reused: int = 0
    made: int = 0
    done: bool = False
    left: bool = False


@dataclass(frozen=True)
class News:
    """What one step has to report: when, rows that take part for the first time with their reused tokens, and new tokens."""

    now: float
    began: list[tuple[Row, int]]
    events: list[tuple[Row, Event]]


class Answers:
    """The answers to the requests of one client, in the order in which their tokens come."""

    def __init__(self, front: "Front", requests: Sequence[Request]):
        self.front, self.arrived = front, time.monotonic()
        self.rows = [Row(place, request, self) for place, request in enumerate(requests)]
        self.news: asyncio.Queue[tuple[int, Event] | ApiError] = asyncio.Queue()

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        """The next (place, event), until every request has ended.

        Raises:
            ApiError: the time is up, the server shuts down, or the engine has died.
        """
        while not (self.news.empty() and all(row.done for row in self.rows)):
            item = await self.news.get()
            if isinstance(item, ApiError):
                raise item
            if not self.rows[item[0]].left:
                return item
        raise StopAsyncIteration

    def end(self, place: int, reason: str) -> None:
        """Ends one of the requests, if it has not ended: its text has reached a stop string. It has no further events, though the
        engine may have been a token ahead."""
        row = self.rows[place]
        row.left = True
        if not row.done:
            self.front.end(row, reason)

    def fail(self, error: ApiError) -> None:
        """Ends all of them; the reader gets the error."""
        for row in self.rows:
            self.end(row.place, "abort")
        self.news.put_nowait(error)

    def reused(self, place: int) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.rows[place].reused


class Front(Admission[Answers, EngineMetrics]):
    """The thread around an engine, and admission to it.

    Args:
        metrics: updated as tokens come.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: EngineMetrics):
        super().__init__(limits, metrics)
        self.engine = engine
        self._rows: dict[int, Row] = {}

    # ---------------------------------------------------------------- the event loop's side

    @asynccontextmanager
    async def open(self, requests: Sequence[Request]) -> AsyncIterator[Answers]:
        """Hands requests to the engine: all of them, or none. Leaving the context aborts those that have not ended.

        Raises:
            ApiError: the engine refuses one of them, too many wait already, the server is shutting down, or the engine has died.
        """
        self._loop = asyncio.get_running_loop()
        self._check([len(r.tokens) for r in requests])
        answers = Answers(self, requests)
        self.opened.add(answers)
        self.waiting += len(requests)
        self.waiting_tokens += sum(len(r.tokens) for r in requests)
        overdue = self._loop.call_later(self.limits.seconds, answers.fail, timed_out(self.limits.seconds))
        try:
            added: Future[None] = Future()
            self._tasks.put(lambda: self._add(answers, added))
            try:
                await asyncio.wrap_future(added)
            except BadInput as error:
                for row in answers.rows:
                    self._begin(row, answers.arrived)
                    row.done = True
                raise of_input(error) from None
            yield answers
        finally:
            overdue.cancel()
            for row in answers.rows:
                if not row.done:
                    self.end(row, "abort")
            self._closed(answers)

    def end(self, row: Row, reason: str) -> None:
        """Ends a row early: the engine forgets it before its next step."""
        self._tasks.put(lambda: self._abort(row))
        self._over(row, reason, time.monotonic())

    def _take(self, news: News) -> None:
        """Hands what a step made to its readers."""
        for row, reused in news.began:
            if row.began is None and not row.done:
                row.reused = reused
                self._begin(row, news.now)
                self.metrics.admitted(len(row.request.tokens), reused, news.now - row.answers.arrived)
        for row, event in news.events:
            if row.done:
                continue
            if event.token is not None:
                row.made += 1
                self.metrics.generated_tokens.inc()
                since = self.metrics.first_token if row.last is None else self.metrics.between
                since.observe(news.now - (row.answers.arrived if row.last is None else row.last))
                row.last = news.now
            if event.reason is not None:
                self._over(row, event.reason, news.now)
            row.answers.news.put_nowait((row.place, event))

    def _begin(self, row: Row, now: float) -> None:
        """The row no longer waits."""
        row.began = now
        self.waiting -= 1
        self.waiting_tokens -= len(row.request.tokens)

    def _over(self, row: Row, reason: str, now: float) -> None:
        if row.began is None:
            self._begin(row, now)
        row.done = True
        self.metrics.answered(reason, row.made, now - row.answers.arrived)

    # ---------------------------------------------------------------- the thread's side

    def _work(self) -> None:
        while True:
            task = None
            while self.failure is not None or not self.engine.busy or not self._tasks.empty():
                if (task := self._tasks.get()) is None:
                    return
                task()
            try:
                self._report(self.engine.step())
            except Exception as error:
                self._failed(error)

    def _add(self, answers: Answers, added: "Future[None]") -> None:
        if not added.set_running_or_notify_cancel():
            return
        done: list[Row] = []
        try:
            if self.failure is not None:
                raise died()
            for row in answers.rows:
                row.number = self.engine.add(row.request)
                self._rows[row.number] = row
                done.append(row)
        except Exception as error:
            for row in done:
                self._abort(row)
            added.set_exception(error)
        else:
            added.set_result(None)

    def _abort(self, row: Row) -> None:
        if self._rows.pop(row.number, None) is not None and self.failure is None:
            self.engine.end(row.number)

    def _report(self, events: list[Event]) -> None:
        now = time.monotonic()
        began: list[tuple[Row, int]] = []
        for sequence in self.engine.scheduler.running:
            row = self._rows.get(sequence.what.number)
            if row is not None and not row.admitted:
                row.admitted = True
                began.append((row, sequence.reused))
        mine = [(row, event) for event in events if event.reason != "abort" and (row := self._rows.get(event.id))]
        for _, event in mine:
            if event.reason is not None:
                del self._rows[event.id]
        if began or mine:
            self._tell(lambda: self._take(News(now, began, mine)))
