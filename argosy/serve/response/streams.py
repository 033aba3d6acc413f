"""The engine requests of one client request: their state, which the engine's thread and the event loop share, and the queue of their
events."""

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
    """One engine request. The thread writes `number` and `admitted`, the event loop all other fields.

    place: its index among the engine requests of the client request.
    request: the engine request.
    answers: the streams that it belongs to.
    number: its id in the engine; -1: not added yet.
    admitted: whether it takes part in steps.
    began, last: the times of its first step and of its last token, on the clock of `time.monotonic`; None: not yet.
    reused: number of prompt tokens found in the prefix cache.
    sampled: number of sampled tokens.
    done: whether it has ended.
    left: whether its reader wants no further events.
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
    """The results of one step.

    now: the time of the step, on the clock of `time.monotonic`.
    began: rows that take part for the first time, each with its number of tokens from the prefix cache.
    events: the new events, each with its row.
    """

    now: float
    began: list[tuple[RequestRow, int]]
    events: list[tuple[RequestRow, Event]]


# A queue of (index of the request, event), or of the error that ends all requests.
Arrivals = asyncio.Queue[tuple[int, Event] | ApiError]


@dataclass(frozen=True)
class StreamPart:
    """The part of a client request that one of several fronts runs.

    places: the indices of its engine requests among those of the client request.
    news: the queue for the events of all parts.
    """

    places: Sequence[int]
    news: Arrivals


class Owner(Protocol):
    """The interface of the front that admits and ends engine requests: `serve.engine.front.Front`."""

    async def admit(self, answers: "EventStreams") -> None: ...

    def end(self, row: RequestRow, reason: str) -> None: ...


class EventStreams:
    """The events of the engine requests of one client request. Iterating yields them in the order in which they arrive.

    rows: the engine requests.
    names: the ids by which `Front.abort` finds the client request.
    adapter: the name of the adapter under which prompts are scored; None: the model alone.
    under: the adapter that had this name when the request was admitted; set by the engine's thread.
    entered: whether engine requests were added to the engine; set by the engine's thread.
    scores: the future of the scores of the prompts.
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
        """Returns the next (index of the request, event), until every request has ended.

        Raises:
            ApiError: time ran out, the server is shutting down, or the engine has died.
        """
        while not (self.news.empty() and all(row.done for row in self.rows)):
            item = await self.news.get()
            if isinstance(item, ApiError):
                raise item
            if not self.rows[item[0]].left:
                return item
        raise StopAsyncIteration

    async def scored(self) -> list[PromptScores]:
        """Waits for the scores of the prompts, and returns them.

        Raises:
            ApiError: as `__anext__`, or the scores cannot be computed.
        """
        return await self.scores

    async def ended(self) -> list[Event]:
        """Waits until all requests have ended, and returns the last event of each.

        Raises:
            ApiError: as `__anext__`.
        """
        events: dict[int, Event] = {}
        async for place, event in self:
            events[place] = event
        return [events[row.place] for row in self.rows]

    async def more(self, requests: Sequence[Request]) -> list[Event]:
        """Opens further engine requests after the earlier ones have ended, waits for them, and returns the last event of each. A pause
        that lets requests finish does not hold them, and limits on waiting requests were checked for the first ones only.

        Raises:
            ApiError: as `__anext__`, or the engine refuses one of them.
        """
        assert self.goes_on
        assert all(row.done for row in self.rows)
        self.rows = [RequestRow(place, request, self) for place, request in enumerate(requests)]
        await self.front.admit(self)
        return await self.ended()

    def end(self, place: int, reason: str) -> None:
        """Ends one of the requests, such as one whose text has reached a stop string. It gets no further events, even if the engine has
        sampled more tokens."""
        self._end(self.rows[place], reason)

    def _end(self, row: RequestRow, reason: str) -> None:
        row.left = True
        if not row.done:
            self.front.end(row, reason)

    def abort(self) -> None:
        """Ends all requests. The reader gets their tokens so far, with the finish reason `abort`."""
        if self.prompts and not self.scores.done():
            return self.fail(ApiError("the request was aborted", status=503, code="aborted"))
        for row in self.rows:
            if not row.done:
                self.front.end(row, "abort")
                self.news.put_nowait((row.place, Event(row.number, None, 0.0, "abort")))

    def fail(self, error: ApiError) -> None:
        """Ends all requests with an error, which the reader gets."""
        for row in self.rows:
            self._end(row, "abort")
        if not self.scores.done():
            self.scores.set_exception(error)
            # Marks the exception as retrieved: a reader that does not ask for scores gets the error from the queue.
            self.scores.exception()
        self.news.put_nowait(error)

    def reused(self, place: int) -> int:
        """The number of prompt tokens of a request that were found in the prefix cache."""
        return self.rows[place].reused
