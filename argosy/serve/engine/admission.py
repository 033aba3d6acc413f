"""Admission of requests to a server: limits on waiting requests, the end of requests that take too long, and the drain before the
server ends. `Computing` adds the thread that computes, for `front.Front` and `encoder.EncoderFront`; `replicas.ReplicaFront` has
several of them.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from argosy.serve.metrics import AllMetrics, ServerMetrics
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError, service_unavailable


class OpenRequests(Protocol):
    """The engine requests that one request of a client has opened."""

    def fail(self, error: ApiError) -> None:
        """Ends it with this error."""
        ...


O = TypeVar("O", bound=OpenRequests)
M = TypeVar("M", bound=ServerMetrics | AllMetrics)


class Admission(Generic[O, M]):
    """The requests that a server has admitted.

    opened: the requests that have not ended.
    """

    def __init__(self, limits: ServerLimits, metrics: M):
        self.limits, self.metrics = limits, metrics
        self.draining = False
        self.opened: set[O] = set()
        self._empty: asyncio.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether an exception has stopped what computes."""
        raise NotImplementedError

    @property
    def queue(self) -> tuple[int, int]:
        """The sequences that have been admitted and have not begun, and their prompt tokens."""
        raise NotImplementedError

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and returns when those that run have ended; after `seconds` they are ended with an error."""
        self.draining = True
        self._empty = asyncio.Event()
        if not self.opened:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        for request in list(self.opened):
            request.fail(shutting_down())

    def _check(self, lengths: Sequence[int]) -> None:
        """Checks that sequences of these lengths may wait.

        Raises:
            ApiError: too many wait already, the server is shutting down, or what computes has stopped.
        """
        if self.failed:
            raise engine_died_error()
        if self.draining:
            raise shutting_down()
        waiting, tokens = self.queue
        many, long = waiting + len(lengths) > self.limits.queue, tokens + sum(lengths) > self.limits.queue_tokens
        if waiting and (many or long):
            self.metrics.rejections.inc()
            raise service_unavailable("too many requests wait already, try again later", "queue_full")

    def _closed(self, request: O) -> None:
        """A request has ended."""
        self.opened.discard(request)
        if self._empty is not None and not self.opened:
            self._empty.set()

    def end_all(self) -> None:
        """Ends all requests with an error: what computes has stopped."""
        for request in list(self.opened):
            request.fail(engine_died_error())


class Computing(Admission[O, M]):
    """One thread that computes, and the requests admitted to it.

    failure: the exception that stopped the thread.
    waiting, waiting_tokens: see `queue`.
    broken: called in the event loop after a failure.
    """

    def __init__(self, limits: ServerLimits, metrics: M):
        super().__init__(limits, metrics)
        self.failure: Exception | None = None
        self.waiting, self.waiting_tokens = 0, 0
        self.broken: Callable[[], object] = self.end_all
        self._loop: asyncio.AbstractEventLoop | None = None
        # None ends the thread.
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def queue(self) -> tuple[int, int]:
        return self.waiting, self.waiting_tokens

    def start(self) -> None:
        """Starts the thread. From now on nobody else may call the engine."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current step."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        """The thread."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        """Ends all requests, now and later: the thread does not know its state. For its `except` block."""
        traceback.print_exc(file=sys.stderr)
        self.failure = error
        self._tell(lambda: self.broken())

    def _tell(self, callback: Callable[[], Any]) -> None:
        # The loop is closed if the server ends while a step is under way: nobody is left to hear of it.
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)


def timed_out(seconds: float) -> ApiError:
    return ApiError(f"the request took more than {seconds:g} seconds", status=504, code="timeout")


def shutting_down() -> ApiError:
    return service_unavailable("the server is shutting down", "shutting_down")


def engine_died_error() -> ApiError:
    return service_unavailable("the engine has stopped after an error", "engine_dead", retry=60)
