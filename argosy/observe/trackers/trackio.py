"""Sends metrics to trackio, Hugging Face's local tracker, whose database file `trackio show` displays."""

from collections.abc import Mapping
from typing import Any

from argosy.observe.trackers.base import TrackedRun, TrackerSettings
from argosy.observe.trackers.packages import check_package, tracker_package


class Trackio(TrackerSettings):
    """trackio, which is displayed by `trackio show`. Its database is under $TRACKIO_DIR, or in its cache."""

    project: str = "argosy"
    """The project of the run."""
    space: str | None = None
    """The Space of the Hub that displays it. None: this machine."""

    def check(self) -> None:
        check_package("trackio", "trackio")

    def open(self, run: TrackedRun, id: str) -> "TrackioRun":
        return TrackioRun(self, run, id)


class TrackioRun:
    """A connection to a run of trackio."""

    whole_steps = False

    def __init__(self, settings: Trackio, run: TrackedRun, id: str):
        trackio = tracker_package("trackio", "trackio")
        # trackio finds runs by their names.
        self.id = id or run.name
        more = {} if settings.space is None else {"space_id": settings.space}
        self.run: Any = trackio.init(
            project=settings.project, name=self.id, resume="allow", config=dict(run.config), embed=False, **more
        )

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        self.run.log(dict(numbers), step=step)

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.run.finish()
