"""What every tracker is: settings that open a connection, to which numbers of steps are sent in their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from argosy.core.settings import Settings

# The folder of a run directory in which trackers keep their files.
FOLDER = "trackers"


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    name: of the run: its directory's.
    folder: where the tracker may keep files: under the run directory, or under the working directory for a run elsewhere.
    config: settings and facts of the run, flat.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]


class Connection(Protocol):
    """An open tracker. Every method may raise: what was not flushed is sent again."""

    # What finds the same run in the tracker when the run resumes; empty if nothing is needed.
    id: str
    # Whether each step is logged once: it is sent when a later one has begun, with all its numbers.
    whole_steps: bool

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Numbers of a step, at a time in seconds since 1970. Steps never fall."""
        ...

    def flush(self) -> None:
        """Returns when everything logged is where a kill of this process does not lose it."""
        ...

    def close(self) -> None: ...


class TrackerSettings(Settings):
    """The settings of every tracker."""

    def open(self, run: TrackedRun, id: str) -> Connection:
        """Opens the tracker.

        Args:
            id: what the last connection of this run had; empty for a new one.

        Raises:
            BadInput: its package is not installed.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises BadInput if its package is not installed; imports nothing heavy."""
