"""The batches of a run by number, with windows of batches that are skipped.

Batch 1 is the first of the run's data. Without rollbacks step n takes batch n; after a rollback, every later step in every later
process skips its window. So the batch of a step depends only on the step's number and the windows.
"""

from collections.abc import Iterable
from typing import Any

from argosy.data.batch import Batch, BatchWrapper

# Of how many of the last steps it is known where their batches began: the loop reads numbers one step late.
KEPT = 3


class At(BatchWrapper):
    """The batches at an earlier position, for a checkpoint of that time."""

    def __init__(self, inner: Any, position: dict[str, Any]):
        super().__init__(inner)
        self._position = position

    def __next__(self) -> Batch:
        raise StopIteration

    def position(self) -> dict[str, Any]:
        return self._position


class Numbered(BatchWrapper):
    """The batches of a run.

    Args:
        inner: the batches; `begin` sets their position.
        left_out: windows of skipped batches, each (first, last).
    """

    def __init__(self, inner: Any, left_out: Iterable[tuple[int, int]] = ()):
        super().__init__(inner)
        self.depends = inner.depends
        self.windows = merge_windows(left_out)
        self.steps = self.number = 0
        self._before: dict[int, tuple[int, At | None]] = {}

    def begin(self, steps: int) -> None:
        """Sets the number of steps whose batches the inner batches have handed out."""
        self.steps = self.number = steps
        self._before = {}
        for first, last in self.windows:
            # A window is passed over when the batch after it is asked for, not before.
            if first <= self.number:
                self.number += last - first + 1

    def leave_out(self, first: int, last: int) -> None:
        """Adds a window of batches to skip."""
        self.windows = merge_windows([*self.windows, (first, last)])

    def __next__(self) -> Batch:
        # What depends on the model has positions that are dear, and cannot go back.
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
        """The number of the batch of a recent step, and the batches at the position before it, if that is known."""
        return self._before[step]

    def advance(self, state: Any) -> None:
        self.inner.advance(state)

    def arrays(self) -> dict[str, Any]:
        return self.inner.arrays()

    def take(self, arrays: dict[str, Any]) -> None:
        self.inner.take(arrays)


def merge_windows(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted windows; overlapping and adjacent ones are merged."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out
