"""Runs tasks ahead of time in a thread, one after another. Results can be saved while they wait in the queue.

The trainer uses it to sample rollouts while it updates. JAX releases the interpreter lock while a device computes, so one thread is
enough.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Prefetch(Generic[In, Out]):
    """A queue of tasks and their results, in order.

    Args:
        do: performs a task; called in the thread. If it raises, `take` raises the exception, and no further task runs.
    """

    def __init__(self, do: Callable[[In], Out]):
        self.do = do
        self._waiting: queue.SimpleQueue[tuple[In, Future[Out]] | None] = queue.SimpleQueue()
        self._pieces: deque[Future[Out]] = deque()
        self._thread: threading.Thread | None = None
        self._failed = False

    def __len__(self) -> int:
        """The number of tasks that were submitted and whose results were not taken yet."""
        return len(self._pieces)

    def submit(self, item: In) -> None:
        if self._thread is None:
            # A second Ctrl-C ends the process without waiting for it.
            self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
            self._thread.start()
        piece: Future[Out] = Future()
        self._pieces.append(piece)
        self._waiting.put((item, piece))

    def take(self) -> Out:
        """Waits for the oldest task and returns its result.

        Raises:
            Exception: the exception of the task.
        """
        return self._pieces.popleft().result()

    def settled(self) -> list[Out]:
        """Waits for all tasks. Returns their results, up to the first task that failed; the results also stay in the queue."""
        out: list[Out] = []
        for piece in self._pieces:
            if piece.exception() is not None:
                break
            out.append(piece.result())
        return out

    def put_back(self, done: Sequence[Out]) -> None:
        """Appends results to the queue, as if their tasks had been submitted."""
        for result in done:
            piece: Future[Out] = Future()
            piece.set_result(result)
            self._pieces.append(piece)

    def close(self) -> None:
        """Waits for the running task, and runs no other."""
        self._failed = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            task, piece = entry
            if self._failed:
                piece.set_exception(RuntimeError("closed, or an earlier piece failed"))
                continue
            try:
                done = self.do(task)
            except BaseException as error:
                self._failed = True
                piece.set_exception(error)
            else:
                piece.set_result(done)
            # The weights of a rollout are not kept until the next one comes.
            del task, piece, entry
