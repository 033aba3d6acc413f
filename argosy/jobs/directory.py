"""A run directory: its settings, its numbers, its checkpoints, and who may write to it.

settings.yml     resolved, each key with who set it
metrics.jsonl    a line a logged step
checkpoints/     <step>/
tokenizer/       what the data was tokenised with
log.txt  report.html
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argosy.checkpoint.store import Checkpoints
from argosy.core.errors import BadInput, Unsupported
from argosy.core.explain import annotated
from argosy.core.settings import Reading, diff, dump, yaml_layer
from argosy.core.storage import Store
from argosy.jobs.run import MAY_CHANGE, Run

SETTINGS, LOG, TOKENIZER = "settings.yml", "log.txt", "tokenizer"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str, settings: Run | None = None, warn: Callable[[str], None] = lambda _: None):
        if "://" in path and not path.startswith("file://"):
            raise Unsupported(
                f"a run directory must be a local folder, not {path}", hint="copy it there when the run is done"
            )
        self.path = Path(path.removeprefix("file://"))
        self.store = Store(self.path)
        self.checkpoints = Checkpoints(self.path / "checkpoints", settings.checkpoint if settings else None, warn)

    @property
    def has_run(self) -> bool:
        return (self.path / SETTINGS).exists()

    def admit(self, reading: Reading[Run]) -> None:
        """Checks that a run with these settings may go on here.

        Raises:
            BadInput: the run here has other settings, each difference named; or nothing can be written here.
        """
        if not self.has_run:
            self._check_place()
            others = {f.name for f in self.path.iterdir()} - {TOKENIZER, ".lock"} if self.path.is_dir() else set()
            if others and not self.checkpoints.steps():
                raise BadInput(f"{self.path} is not empty, and no run", hint="dir=NEW names another directory")
            if self.checkpoints.steps():
                raise BadInput(
                    f"{self.path} holds checkpoints but no {SETTINGS}", hint="dir=NEW starts a run elsewhere"
                )
            return
        stored = dict(yaml_layer(self.path / SETTINGS).values)
        changed = [(k, was, now) for k, was, now in diff(stored, dump(reading.value)) if k not in MAY_CHANGE]
        if changed:
            told = "; ".join(f"{key}: {was} there, {now} now" for key, was, now in changed[:4])
            more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise BadInput(
                f"{self.path} holds a run with other settings",
                where=told + more,
                hint="give the same settings to go on, or dir=NEW to start another run",
            )

    def _check_place(self) -> None:
        """That the directory can be made, before anything is built that would be lost."""
        here = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not here.is_dir():
            raise BadInput(f"{here} is a file", hint="dir=NEW names another directory")
        if not os.access(here, os.W_OK | os.X_OK):
            raise BadInput(f"no permission to write in {here}", hint="dir=NEW names another directory")

    def write_settings(self, reading: Reading[Run]) -> None:
        self.store.write_text(SETTINGS, annotated(reading))

    def log(self, line: str) -> None:
        self.store.append_line(LOG, line)


def stored_settings(path: Path) -> dict[str, Any]:
    """The resolved settings of a run directory."""
    return dict(yaml_layer(path / SETTINGS).values)
