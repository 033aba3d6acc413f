"""Measures the wall time that a run spends by cause: compile, step, data, rollouts, checkpoint, evaluation, samples, and other.

Causes may be nested. The time of an inner cause does not count for the outer one. `observe.life` sums the times over all starts of a
run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Running:
    """A cause that has begun and not ended.

    start: the time at which it began.
    inner: the seconds of finished causes inside it.
    """

    cause: str
    start: float
    inner: float = 0.0


class Clock:
    """Adds up seconds by cause.

    clock = Clock()
    with clock("data"): batch = next(batches)
    clock.seconds       {"data": 0.01}

    tell: called with each cause that begins or continues.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = lambda _: None
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self._running: list[_Running] = []

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        self._running.append(_Running(cause, time.perf_counter()))
        self.tell(cause)
        try:
            yield
        finally:
            over = self._running.pop()
            spent = time.perf_counter() - over.start
            self.seconds[cause] = self.seconds.get(cause, 0.0) + spent - over.inner
            if self._running:
                self._running[-1].inner += spent
            self.tell(self._running[-1].cause if self._running else "")

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self.started

    def shares(self) -> dict[str, float]:
        """Returns the seconds by cause up to now, including causes that have not ended. Time outside all causes is `other`."""
        now, seconds = time.perf_counter(), dict(self.seconds)
        within = 0.0
        for span in reversed(self._running):
            spent = now - span.start
            seconds[span.cause] = seconds.get(span.cause, 0.0) + spent - span.inner - within
            within = spent
        return seconds | {"other": max(0.0, now - self.started - sum(seconds.values()))}
