"""The checkpoints of a run of several processes: each writes its own shards, and the leader commits them.

    leader      removes what a kill left, makes the folder
    each        writes and hashes the shards of its own devices
    leader      collects the hashes; writes what describes the arrays, meta.json, and last the manifest

All of it runs in a thread beside training. If it fails in one process, the step is not committed, all of them know why, and the next
save is tried again. The folder must be one that every process sees.
"""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.checkpoint import manifest, shards
from argosy.checkpoint.store import DATA, META, STATE, WEIGHTS, Arrays, Checkpoints, catalog
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.formats.files import of_text
from argosy.parallel import processes

Items = dict[str, dict[str, shards.Split]]


class CheckpointsOfSeveral(Checkpoints):
    """As `Checkpoints`, where every process calls `save` for the same steps."""

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        self.settle(step)
        if processes.told("saved", lambda: self._is_committed(str(step))):
            return
        items = {WEIGHTS: weights, STATE: state} | ({DATA: data} if data else {})
        mine = shards.split_all(items, processes.leads())
        job = (step, mine, json.dumps(dict(meta), indent=1))
        self._writing = threading.Thread(target=self._write_together, args=job, name=f"checkpoint-{step}")
        self._writing.start()

    def _write_together(self, step: int, items: Items, meta: str) -> None:
        folder = self.path(step)
        files = [file for item, own in items.items() for file in shards.files_of(item, own)]
        try:
            processes.told("checkpoint begins", lambda: self._begin(step))
            written = processes.together("checkpoint shards", lambda: shards.write(folder, files))
            every = processes.collected("checkpoint hashes", written)
            processes.told("checkpoint committed", lambda: self._commit(step, items, meta, every))
        except BaseException as failure:
            self._failure = failure
            # It takes space that the next save may need. Where it cannot be removed either, it stays, without a manifest.
            with suppress(ArgosyError):
                if processes.leads() and not self._is_committed(str(step)):
                    self.store.remove(str(step))

    def _begin(self, step: int) -> None:
        self._sweep()
        self.store.remove(str(step))
        self.path(step).mkdir(parents=True)

    def _commit(self, step: int, items: Items, meta: str, every: list[shards.Described]) -> None:
        folder, found = self.path(step), {name: its for own in every for name, its in own.items()}
        described = [file._replace(name=f"{item}/{file.name}") for item, own in items.items() for file in shards.described(own)]
        described += [*catalog(items), of_text(META, meta)]
        manifest.commit(folder, dict(sorted((found | shards.write(folder, described)).items())))
        self.retire(step)


def check_shared(folder: Path) -> None:
    """Checks that all processes see one folder, by a file that the leader writes.

    Raises:
        BadInput: one does not; in that process. Elsewhere: in the others.
    """
    probe = folder / ".shared"
    token = processes.told("shared folder", lambda: _written(probe))

    def look() -> None:
        try:
            same = probe.read_text() == token
        except OSError:
            same = False
        if not same:
            what = f"process {processes.rank()} does not see the files that process 0 writes in {folder}"
            raise BadInput(what, hint="dir= must be a folder that all machines of the run share")

    try:
        processes.together("shared folder seen", look)
    finally:
        if processes.leads():
            probe.unlink(missing_ok=True)


def _written(probe: Path) -> str:
    from uuid import uuid4

    probe.parent.mkdir(parents=True, exist_ok=True)
    token = uuid4().hex
    probe.write_text(token)
    return token
