"""Sends metrics to Weights & Biases. Without a network or a key, it writes files that `wandb sync` later uploads to the same run."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from argosy.observe.trackers.base import TrackedRun, TrackerSettings
from argosy.observe.trackers.packages import check_package, tracker_package

HOST, WAIT_S = "https://api.wandb.ai", 3.0


class WeightsAndBiases(TrackerSettings):
    """Weights & Biases (wandb.ai)."""

    project: str = "argosy"
    """The project of the run."""
    entity: str | None = None
    """The team or user. None: that of the key."""
    run_name: str | None = None
    """The run's name. None: that of its directory."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """offline: writes files for `wandb sync`. auto: offline without a key, or where the server is not reached in 3 s, and otherwise
    online."""

    def check(self) -> None:
        check_package("wandb", "wandb")

    def open(self, run: TrackedRun, id: str) -> "WandbRun":
        return WandbRun(self, run, id or uuid4().hex[:8])


class WandbRun:
    """A connection to a run of Weights & Biases. Further metrics of a committed step would be ignored."""

    whole_steps = True

    def __init__(self, settings: WeightsAndBiases, run: TrackedRun, id: str):
        wandb = tracker_package("wandb", "wandb")
        self.id = id
        run.folder.mkdir(parents=True, exist_ok=True)
        mode = settings.mode if settings.mode != "auto" else "online" if is_reachable() else "offline"
        self.run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.run_name or run.name,
            id=id,
            resume="allow" if mode == "online" else None,
            dir=str(run.folder),
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        # Committed at once, because only then the step is complete in the file.
        self.run.log(dict(numbers) | {"_timestamp": time}, step=step, commit=True)

    def flush(self) -> None:
        # A process of wandb writes what it was sent.
        return

    def close(self) -> None:
        self.run.finish()


def is_reachable() -> bool:
    """Whether there is a key and the server answers."""
    if not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().is_file():
        return False
    place = urlsplit(os.environ.get("WANDB_BASE_URL", HOST))
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=WAIT_S).close()
    except OSError:
        return False
    return True
