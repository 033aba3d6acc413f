"""Numbers the batches of a run, and skips windows of them.

Batch 1 is the first of the run's data. Without rollbacks, step n takes batch n. A rollback adds a window of batch numbers, which every
later step skips, also after a restart. So the batch of a step depends only on the number of the step and on the windows.
"""

from collections.abc import Iterable
from typing import Any

from argosy.data.batch import Batch, BatchWrapper

# The number of recent steps whose batch positions are kept. The loop reads metrics one step late.
KEPT = 3


class At(BatchWrapper):
    """Batches that report an earlier position, for a checkpoint of the step that had it. They yield nothing."""

    def __init__(self, inner: Any, position: dict[str, Any]):
        super().__init__(inner)
        self._position = position

    def __next__(self) -> Batch:
        raise StopIteration

    def position(self) -> dict[str, Any]:
        return self._position


class Numbered(BatchWrapper):
    """The batches of a run, without those in skipped windows.

    Args:
        inner: all batches.
        left_out: the windows of batches to skip, each (first, last) by batch number, both included.
    """

    def __init__(self, inner: Any, left_out: Iterable[tuple[int, int]] = ()):
        super().__init__(inner)
        self.depends = inner.depends
        self.windows = merge_windows(left_out)
        self.steps = self.number = 0
        self._before: dict[int, tuple[int, At | None]] = {}

    def begin(self, steps: int) -> None:
        """Sets the number of steps done so far. The inner batches must be at the position after those steps."""
        self.steps = self.number = steps
        self._before = {}
        for first, last in self.windows:
            # The batches of a window are skipped only when the batch after it is asked for.
            if first <= self.number:
                self.number += last - first + 1

    def leave_out(self, first: int, last: int) -> None:
        """Adds a window of batches to skip, from number `first` to number `last`, both included."""
        self.windows = merge_windows([*self.windows, (first, last)])

    def __next__(self) -> Batch:
        # Positions of batches that depend on the model are expensive, and such batches cannot go back.
        before = None if self.depends else At(self.inner, self.inner.position())
        number = self.number + 1
        for first, last in self.windows:
            while first <= number <= last:
                next(self.inner)
                number += 1
        batch = next(self.inner)
        self.steps, self.number = self.steps + 1, number
        self._before[self.steps] = (number, before)
        self._before.pop(self.steps - KEPT, None)
        return batch

    def of_step(self, step: int) -> tuple[int, At | None]:
        """The number of the batch that one of the last KEPT steps took, and the batches at the position before it (None: unknown)."""
        return self._before[step]

    def advance(self, state: Any) -> None:
        self.inner.advance(state)

    def arrays(self) -> dict[str, Any]:
        return self.inner.arrays()

    def take(self, arrays: dict[str, Any]) -> None:
        self.inner.take(arrays)


def merge_windows(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorts windows, and merges overlapping and adjacent ones."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out
