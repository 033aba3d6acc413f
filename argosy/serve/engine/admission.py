"""Admission of requests to a server: limits on waiting requests, time limits, and the drain before the server ends.

`Computing` adds the thread that computes. `front.Front` and `encoder.EncoderFront` derive from it, and `replicas.ReplicaFront` has
several such threads.
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
    """The engine requests of one client request."""

    def fail(self, error: ApiError) -> None:
        """Ends the client request with this error."""
        ...


O = TypeVar("O", bound=OpenRequests)
M = TypeVar("M", bound=ServerMetrics | AllMetrics)


class Admission(Generic[O, M]):
    """The requests that a server has admitted.

    draining: whether new requests are refused because the server is about to end.
    opened: the client requests that have not ended.
    """

    def __init__(self, limits: ServerLimits, metrics: M):
        self.limits, self.metrics = limits, metrics
        self.draining = False
        self.opened: set[O] = set()
        self._empty: asyncio.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether an exception has stopped the computing thread."""
        raise NotImplementedError

    @property
    def queue(self) -> tuple[int, int]:
        """The number of sequences that have been admitted but have not begun, and of their prompt tokens."""
        raise NotImplementedError

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and returns when all open ones have ended. After `seconds` it ends them with an error."""
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
        """Checks that sequences of these lengths (prompt tokens) can be admitted.

        Raises:
            ApiError: too many wait already, the server is shutting down, or the computing thread has stopped.
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
        """Removes a client request that has ended."""
        self.opened.discard(request)
        if self._empty is not None and not self.opened:
            self._empty.set()

    def end_all(self) -> None:
        """Ends all requests with an error, because the computing thread has stopped."""
        for request in list(self.opened):
            request.fail(engine_died_error())


class Computing(Admission[O, M]):
    """One thread that computes, and the requests admitted to it.

    failure: the exception that stopped the thread; None: it runs.
    waiting, waiting_tokens: the two numbers of `queue`.
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
        """Starts the thread. From then on only this thread may call the engine."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current step."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        """The function that the thread runs."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        """Ends all requests, and refuses later ones, because the state of the engine is unknown. Called in the thread's `except`
        block."""
        traceback.print_exc(file=sys.stderr)
        self.failure = error
        self._tell(lambda: self.broken())

    def _tell(self, callback: Callable[[], Any]) -> None:
        # The loop is closed if the server ends during a step. The callback is then dropped.
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)


def timed_out(seconds: float) -> ApiError:
    return ApiError(f"the request took more than {seconds:g} seconds", status=504, code="timeout")


def shutting_down() -> ApiError:
    return service_unavailable("the server is shutting down", "shutting_down")


def engine_died_error() -> ApiError:
    return service_unavailable("the engine has stopped after an error", "engine_dead", retry=60)
