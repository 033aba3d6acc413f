"""The answers to the requests of one client: what the engine's thread and the event loop both know of them, and the queue through
which their tokens come."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from argosy.infer.engine.adapters import LoadedAdapter
from argosy.infer.engine.request import Event, Request
from argosy.infer.prompt_logprobs import PromptScores
from argosy.web.errors import ApiError


@dataclass(eq=False)
class RequestRow:
    """One request of the engine. The thread writes `number` and `admitted`, the event loop everything else.

    number: the engine's.
    admitted: it takes part in steps.
    began, last: when it did first, when its last token came.
    reused: prompt tokens found in the prefix cache.
    sampled: tokens of the answer.
    done: it has ended.
    left: its reader wants no more of it.
    """

    place: int
    request: Request
    answers: "EventStreams"
    number: int = -1
    admitted: bool = False
    began: float | None = None
    last: float | None = None
    reused: int = 0
    sampled: int = 0
    done: bool = False
    left: bool = False


@dataclass(frozen=True)
class StepNews:
    """The news of one step: its time, rows that take part for the first time with their reused tokens, and new tokens."""

    now: float
    began: list[tuple[RequestRow, int]]
    events: list[tuple[RequestRow, Event]]


# (which of the requests, its event), or why there are no more.
Arrivals = asyncio.Queue[tuple[int, Event] | ApiError]


@dataclass(frozen=True)
class StreamPart:
    """The part of a client's requests that one of several fronts answers.

    places: of these requests among all.
    news: events of all parts.
    """

    places: Sequence[int]
    news: Arrivals


class Owner(Protocol):
    """The front that admits completions and ends them: `serve.engine.front.Front`."""

    async def admit(self, answers: "EventStreams") -> None: ...

    def end(self, row: RequestRow, reason: str) -> None: ...


class EventStreams:
    """The completions of one client's requests, in the order in which their tokens arrive.

    names: ids by which `Front.abort` finds them.
    adapter: name of the adapter under which prompts are scored.
    under: the adapter that had this name when the request was admitted; set by the engine's thread.
    entered: whether the engine has received requests of it; set by the engine's thread.
    """

    def __init__(
        self,
        front: Owner,
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]] = (),
        names: Sequence[str] = (),
        adapter: str | None = None,
        part: StreamPart | None = None,
        *,
        goes_on: bool = False,
    ):
        self.front, self.arrived, self.prompts, self.names = front, time.monotonic(), prompts, names
        self.goes_on, self.entered = goes_on, False
        self.adapter = adapter
        self.under: LoadedAdapter | None = None
        self.scores: asyncio.Future[list[PromptScores]] = asyncio.get_running_loop().create_future()
        places = range(len(requests)) if part is None else part.places
        self.rows = [RequestRow(place, request, self) for place, request in zip(places, requests, strict=True)]
        self.news: Arrivals = asyncio.Queue() if part is None else part.news

    def __aiter__(self) -> "EventStreams":
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

    async def scored(self) -> list[PromptScores]:
        """The scores of the prompts.

        Raises:
            ApiError: as `__anext__`, or they cannot be computed.
        """
        return await self.scores

    async def ended(self) -> list[Event]:
        """The last event of each request, once all of them have ended.

        Raises:
            ApiError: as `__anext__`.
        """
        events: dict[int, Event] = {}
        async for place, event in self:
            events[place] = event
        return [events[row.place] for row in self.rows]

    async def more(self, requests: Sequence[Request]) -> list[Event]:
        """Hands over further requests, now that the earlier ones have ended; returns the last event of each. They do not wait behind
        a pause that lets requests finish, and the limits on waiting requests have been checked at the first ones.

        Raises:
            ApiError: as `__anext__`, or the engine refuses one of them.
        """
        assert self.goes_on
        assert all(row.done for row in self.rows)
        self.rows = [RequestRow(place, request, self) for place, request in enumerate(requests)]
        await self.front.admit(self)
        return await self.ended()

    def end(self, place: int, reason: str) -> None:
        """Ends one of the requests, if it has not ended: its text has reached a stop string. It has no further events, though the
        engine may have been a token ahead."""
        self._end(self.rows[place], reason)

    def _end(self, row: RequestRow, reason: str) -> None:
        row.left = True
        if not row.done:
            self.front.end(row, reason)

    def abort(self) -> None:
        """Ends all of them; the reader gets what they have so far, with the reason `abort`."""
        if self.prompts and not self.scores.done():
            return self.fail(ApiError("the request was aborted", status=503, code="aborted"))
        for row in self.rows:
            if not row.done:
                self.front.end(row, "abort")
                self.news.put_nowait((row.place, Event(row.number, None, 0.0, "abort")))

    def fail(self, error: ApiError) -> None:
        """Ends all of them; the reader gets the error."""
        for row in self.rows:
            self._end(row, "abort")
        if not self.scores.done():
            self.scores.set_exception(error)
            # It counts as read: a reader that does not ask for scores gets the error from the queue.
            self.scores.exception()
        self.news.put_nowait(error)

    def reused(self, place: int) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.rows[place].reused
