"""Records the step and the current activity of a process in a small file, which a supervisor reads after the process ended. This module
does not import jax.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# The environment variable in which a supervisor names the file.
WHERE = "ARGOSY_WHERE"
# Words for the causes of `goodput.Clock`.
WORDS = {
    "start": "while it started", "compile": "while it compiled", "data": "waiting for data", "rollouts": "in a rollout",
    "step": "in the training step", "evaluation": "in an evaluation", "checkpoint": "while it saved", "samples": "while it sampled",
}  # fmt: skip
SIZE = 64


class Whereabouts:
    """Writes the file of this process, which takes a microsecond or two. Each line has the same size and replaces the one before.

    Args:
        path: the file.
        step: returns the current step, None before the first.
    """

    def __init__(self, path: Path, step: Callable[[], int | None]):
        self.step = step
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def __call__(self, cause: str) -> None:
        """Records the current activity. `cause`: a cause of `goodput.Clock`, "" for other activities."""
        step = self.step()
        line = f"{'' if step is None else step} {cause}".ljust(SIZE)
        # If the disk is full, the line is lost and the run goes on.
        with suppress(OSError):
            os.pwrite(self._file, line.encode(), 0)

    def close(self) -> None:
        os.close(self._file)


def whereabouts(path: Path) -> str:
    """Describes the last recorded step and activity of a process, such as `after step 48, while it saved`; empty if unknown."""
    try:
        step, _, cause = path.read_text().rstrip().partition(" ")
    except (OSError, ValueError):
        return ""
    return ", ".join(part for part in (f"after step {int(step):,}" if step.isdigit() else "", WORDS.get(cause, "")) if part)
