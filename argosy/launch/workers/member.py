"""One process of a group, as the controller sees it: pending requests, output, and whether the process has ended."""

import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

# Lines that are kept of what a process prints.
KEPT = 200


class Transport(Protocol):
    """The connection to a process, on this machine or another."""

    pid: int

    def send(self, data: bytes) -> None: ...
    def kill(self) -> None: ...
    def leave(self) -> None: ...


class WorkerEnded(Exception):
    """The process ended before it replied."""


class WorkerProcess:
    """A process of a group.

    died: called, from a thread, when the process has ended.
    """

    def __init__(self, rank: int, print_line: Callable[[str], None], died: Callable[["WorkerProcess"], None]):
        self.rank, self.print_line, self.died = rank, print_line, died
        self.printed: deque[str] = deque(maxlen=KEPT)
        self.code: int | None = None
        self.over = threading.Event()
        self.transport: Transport | None = None
        self.address: Any = None
        self._lock, self._next = threading.Lock(), 1
        # The process answers 0 when it has joined the others.
        self.joined: Future[Any] = Future()
        self._asked: dict[int, Future[Any]] = {0: self.joined}

    def ask(self, kind: str, payload: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.code is not None:
                future.set_exception(WorkerEnded())
                return future
            number, self._next = self._next, self._next + 1
            self._asked[number] = future
        self._send(number, kind, payload)
        return future

    def tell(self, kind: str, payload: Any) -> None:
        """Sends a request that has no reply."""
        self._send(-1, kind, payload)

    def _send(self, number: int, kind: str, payload: Any) -> None:
        if self.transport is not None:
            self.transport.send(pickle.dumps((number, kind, payload), protocol=5))

    def heard(self, data: bytes) -> None:
        number, outcome = pickle.loads(data)
        with self._lock:
            future = self._asked.pop(number, None)
        if future is not None:
            future.set_result(outcome)

    def prints(self, line: str) -> None:
        self.printed.append(line)
        self.print_line(line)

    def ended(self, code: int) -> None:
        with self._lock:
            self.code, futures, self._asked = code, self._asked, {}
        self.died(self)
        self.over.set()
        for future in futures.values():
            future.set_exception(WorkerEnded())
