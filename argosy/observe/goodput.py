"""Measures where wall time goes, by cause: compile, step, data, rollouts, checkpoint, evaluation, samples, and the rest.

Causes nest: time inside an inner one does not count for the outer one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by cause.

    clock = Clock()
    with clock("data"): batch = next(batches)
    clock.seconds       {"data": 0.01}
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            inner = self._inner.pop()
            self.seconds[cause] = self.seconds.get(cause, 0.0) + spent - inner
            if self._inner:
                self._inner[-1] += spent

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self.started

    def shares(self) -> dict[str, float]:
        """Seconds by cause; time outside all causes is `other`."""
        return self.seconds | {"other": max(0.0, self.elapsed - sum(self.seconds.values()))}
