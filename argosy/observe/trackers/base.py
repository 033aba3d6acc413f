"""The interface of trackers: settings that open a connection, to which the metrics of steps are sent in order."""

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

    name: the name of the run directory.
    folder: the folder in which the tracker may keep files. It is in the run directory, or in the working directory for a remote run.
    config: the settings and facts of the run, by dotted name.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]


class Connection(Protocol):
    """An open tracker. Every method may raise an error, after which all metrics since the last flush are sent again."""

    # The id by which the tracker finds the same run when it resumes; empty if none is needed.
    id: str
    # Whether each step must be logged once. It is then sent with all its metrics when a later step has begun.
    whole_steps: bool

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Sends metrics of a step. `time`: seconds since 1970. Steps never decrease between calls."""
        ...

    def flush(self) -> None:
        """Waits until everything logged is stored so that it survives a kill of this process."""
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
