"""The batches of a run by number, some of which are left out.

Batch 1 is the first of the run's data. Without rollbacks step n takes batch n; a window that a rollback left out is passed over by
every later step, in every later process: which batches a step takes follows from its number and the windows alone.
"""

from collections.abc import Iterable
from typing import Any

from argosy.data.batch import Batch, BatchWrapper

# Of how many of the last steps it is known where their batches began: the loop reads numbers one step late.
KEPT = 3


class At(BatchWrapper):
    """The batches where they once stood, for a checkpoint of then."""

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
        inner: the batches; `begin` says where they stand.
        left_out: windows of batches, each (first, last).
    """

    def __init__(self, inner: Any, left_out: Iterable[tuple[int, int]] = ()):
        super().__init__(inner)
        self.depends = inner.depends
        self.windows = joined(left_out)
        self.steps = self.number = 0
        self._before: dict[int, tuple[int, At | None]] = {}

    def begin(self, steps: int) -> None:
        """The inner batches stand where so many steps had taken theirs."""
        self.steps = self.number = steps
        self._before = {}
        for first, last in self.windows:
            # A window is passed over when the batch after it is asked for, not before.
            if first <= self.number:
                self.number += last - first + 1

    def leave_out(self, first: int, last: int) -> None:
        """Leaves out one more window."""
        self.windows = joined([*self.windows, (first, last)])

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
        """The number of the batch that one of the last steps took, and the batches as they stood before it, if that is known."""
        return self._before[step]

    def advance(self, state: Any) -> None:
        self.inner.advance(state)

    def arrays(self) -> dict[str, Any]:
        return self.inner.arrays()

    def take(self, arrays: dict[str, Any]) -> None:
        self.inner.take(arrays)


def joined(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows in order, those that overlap or touch as one."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out
