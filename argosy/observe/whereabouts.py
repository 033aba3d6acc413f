"""Where a process of a run is: its step, and what it does there. It is kept in a small file that a supervisor reads after the process
has stopped or is gone. No jax is imported here.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Set by a supervisor: the file.
WHERE = "ARGOSY_WHERE"
# By cause of `goodput.Clock`.
WORDS = {
    "start": "while it started", "compile": "while it compiled", "data": "waiting for data", "rollouts": "in a rollout",
    "step": "in the training step", "evaluation": "in an evaluation", "checkpoint": "while it saved", "samples": "while it sampled",
}  # fmt: skip
SIZE = 64


class Whereabouts:
    """Writes the file of this process, in a microsecond or two: a line of always the same size, over the one before.

    Args:
        step: asked for the step; None before the first.
    """

    def __init__(self, path: Path, step: Callable[[], int | None]):
        self.step = step
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def __call__(self, cause: str) -> None:
        """cause: what the process does from now on; empty: nothing with a name."""
        step = self.step()
        line = f"{'' if step is None else step} {cause}".ljust(SIZE)
        # A disk that is full costs the line, not the run.
        with suppress(OSError):
            os.pwrite(self._file, line.encode(), 0)

    def close(self) -> None:
        os.close(self._file)


def whereabouts(path: Path) -> str:
    """The place of a process in words, such as `after step 48, while it saved`; empty where it is not known."""
    try:
        step, _, cause = path.read_text().rstrip().partition(" ")
    except (OSError, ValueError):
        return ""
    return ", ".join(part for part in (f"after step {int(step):,}" if step.isdigit() else "", WORDS.get(cause, "")) if part)
