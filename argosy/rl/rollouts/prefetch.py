"""Work that is done ahead in a thread of its own, one piece after the other, and whose results can be kept before they are taken.

Rollouts are sampled so while the trainer updates. JAX releases the interpreter while a device computes, so one thread is enough.
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
    """Pieces of work in their order.

    Args:
        do: the work, called in the thread. What it raises is raised by `take`, and nothing is done after it.
    """

    def __init__(self, do: Callable[[In], Out]):
        self.do = do
        self._waiting: queue.SimpleQueue[tuple[In, Future[Out]] | None] = queue.SimpleQueue()
        self._pieces: deque[Future[Out]] = deque()
        self._thread: threading.Thread | None = None
        self._failed = False

    def __len__(self) -> int:
        """Pieces that were submitted and not taken yet."""
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
        """Waits for the oldest piece and hands it out.

        Raises:
            Exception: what the work raised.
        """
        return self._pieces.popleft().result()

    def settled(self) -> list[Out]:
        """Waits for all pieces. Returns those that are done, which stay; one that failed ends the list."""
        out: list[Out] = []
        for piece in self._pieces:
            if piece.exception() is not None:
                break
            out.append(piece.result())
        return out

    def put_back(self, done: Sequence[Out]) -> None:
        """Puts results at the end, as if they had been submitted."""
        for one in done:
            piece: Future[Out] = Future()
            piece.set_result(one)
            self._pieces.append(piece)

    def close(self) -> None:
        """Waits for the piece that is being done, and does no other."""
        self._failed = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            what, piece = found
            if self._failed:
                piece.set_exception(RuntimeError("closed, or an earlier piece failed"))
                continue
            try:
                done = self.do(what)
            except BaseException as error:
                self._failed = True
                piece.set_exception(error)
            else:
                piece.set_result(done)
            # The weights of a rollout are not kept until the next one comes.
            del what, piece, found
