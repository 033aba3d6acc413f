"""The checkpoints of a run of several processes: each writes its own shards, and the leader commits them.

    leader      removes what a kill left, makes the folder
    each        writes and hashes the shards of its own devices
    leader      collects the hashes; writes what describes the arrays, meta.json, and last the manifest

All of it runs in a thread beside training. If it fails in one process, the step is not committed, all of them know why, and the next
save is tried again. The folder must be one that every process sees; object stores have a module of their own (`several_objects`).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from argosy.checkpoint.saving.memory import Copies
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import DATA, META, STATE, WEIGHTS, Arrays, catalog
from argosy.checkpoint.store import Checkpoints
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.formats.files import File, of_text
from argosy.core.storage import Missing, Store
from argosy.parallel import processes
from argosy.weights import manifest

Items = dict[str, dict[str, shards.Split]]
# Hidden, so that a directory with nothing else is empty.
PROBE = ".shared"


class CheckpointsOfSeveral(Checkpoints):
    """As `Checkpoints`, where every process calls `save` for the same steps."""

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        self.settle(step)
        if processes.told("saved", lambda: self._seems_committed(step)):
            return
        items = {WEIGHTS: weights, STATE: state} | ({DATA: data} if data else {})
        copies = self.memory.copies()
        mine = shards.split_all(items, copies, processes.leads())
        self.start(self._write_together, step, mine, copies, json.dumps(dict(meta), indent=1))

    def copied(self, weights: Arrays, state: Arrays) -> Counter[int]:
        return shards.sizes({WEIGHTS: weights, STATE: state})

    def _write_together(self, step: int, items: Items, copies: Copies, meta: str) -> None:
        try:
            files = [file for item, own in items.items() for file in shards.files_of(item, own)]
            processes.told("checkpoint begins", lambda: self._begin(step))
            written = processes.together("checkpoint shards", lambda: self._put(step, files))
            every = processes.collected("checkpoint hashes", written)
            processes.told("checkpoint committed", lambda: self._commit(step, items, meta, every))
            copies.release()
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
        found = {name: its for own in every for name, its in own.items()}
        described = [file._replace(name=f"{item}/{file.name}") for item, own in items.items() for file in shards.described(own)]
        described += [*catalog(items), of_text(META, meta)]
        self._seal(step, dict(sorted((found | self._put(step, described)).items())))
        self.retire_or_say(step)

    def _put(self, step: int, files: Iterable[File]) -> shards.Described:
        """Writes files of a step; returns their sizes and hashes."""
        return shards.write(self.path(step), files, self._pace)

    def _seal(self, step: int, files: dict[str, Any]) -> None:
        """Writes the manifest of a step, whose files are all there."""
        manifest.commit(self.path(step), files)


def check_shared(store: Store) -> None:
    """Checks that all processes see the same files, by one that the leader writes.

    Raises:
        BadInput: one does not; in that process. Elsewhere: in the others.
    """
    token = processes.told("shared files", lambda: _written(store))

    def look() -> None:
        try:
            same = store.read_text(PROBE) == token
        except Missing:
            same = False
        if not same:
            what = f"process {processes.rank()} does not see the files that process 0 writes in {store.root}"
            raise BadInput(what, hint="dir= must be a folder that all machines of the run share, or an address such as gs://BUCKET/RUN")

    try:
        processes.together("shared files seen", look)
    finally:
        if processes.leads():
            store.remove(PROBE)


def _written(store: Store) -> str:
    token = uuid4().hex
    store.write_text(PROBE, token)
    return token
