"""The checkpoints of a run of several processes in an object store: each sends the shards of its own devices, and fetches what its own
devices need.

    write     each     a file for each shard, hashed on its way
              leader   what describes the arrays, meta.json, and last the manifest
    verify    each     reads and hashes its part of the files, of which it keeps nothing
    read      each     what describes the step, then the shards that its devices need, to a scratch folder; hashed again on arrival

So none holds a whole checkpoint, but for a step that one process packed (`store.pack_step`), which each fetches whole.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from argosy.checkpoint import objects
from argosy.checkpoint.failures import root_of
from argosy.checkpoint.several import CheckpointsOfSeveral
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import Arrays, describes
from argosy.core.errors import ArgosyError, Damaged
from argosy.core.formats.files import File
from argosy.core.storage import Store
from argosy.parallel import processes
from argosy.weights import manifest

# Requests of this process that are under way at once. Most of a small one is waiting.
REQUESTS = 16


class Held(NamedTuple):
    """The step that was agreed on. folder: on this machine, with the files that are here. files: of its manifest."""

    step: int
    folder: Path
    files: Mapping[str, Any]


class CheckpointsOfSeveralElsewhere(CheckpointsOfSeveral):
    """As `CheckpointsOfSeveral`, where no folder is shared. All processes make the same calls."""

    _held: Held | None = None

    # ---------------------------------------------------------------- writing

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        # What was resumed from is on the devices.
        self._let_go()
        super().save(step, weights, state, meta, data)

    def _begin(self, step: int) -> None:
        self._sweep()
        self.store.remove(str(step))

    def _put(self, step: int, files: Iterable[File]) -> shards.Described:
        # Only the leader writes through the store of the run; shards are every process's own.
        return objects.put(Store(self.store.root), str(step), files, REQUESTS)

    def _seal(self, step: int, files: dict[str, Any]) -> None:
        self.store.write_text(f"{step}/{manifest.NAME}", manifest.text(files))

    # ---------------------------------------------------------------- verifying

    def latest_good(self, above: int | None = None) -> int | None:
        raise AssertionError("several processes verify together: agreed_good")

    def agreed_good(self, above: int | None = None) -> int | None:
        """As `Checkpoints.latest_good`, by all processes together; the step's description is on this machine then."""
        steps = processes.told("steps", lambda: [step for step in self.steps() if above is None or step > above])
        damaged: dict[int, Damaged] = {}
        good, fault = None, None
        for step in reversed(steps):
            fault = self._fault(step)
            if not isinstance(fault, Damaged):
                good = step
                break
            damaged[step] = fault

        def settle() -> None:
            # A step that cannot be reached (no permission, no network) may be good.
            if good is not None and fault is not None:
                raise fault
            if good is None:
                self._none_good(steps, damaged, above)
            else:
                self._pass_by(damaged, good)

        processes.told("good step", settle)
        if good is not None:
            self._hold(good)
        return good

    def _fault(self, step: int) -> ArgosyError | None:
        """What is wrong with a step, the same in all processes; None where nothing is."""
        own = self._own_fault(step)
        every = processes.collected("faults", None if own is None else [isinstance(own, Damaged), own.what, own.where])
        if (found := next((one for one in every if one is not None), None)) is None:
            return None
        # What cannot be reached is no mistake of the user's: a supervisor starts the run again.
        return (Damaged if found[0] else ArgosyError)(found[1], where=found[2])

    def _own_fault(self, step: int) -> ArgosyError | None:
        """What is wrong with this process's part of the files of a step."""
        try:
            files = objects.manifest_of(self.store, str(step))
            # Largest first, so that no process is left with one at the end.
            names = sorted(files, key=lambda name: (-files[name]["bytes"], name))[processes.rank() :: processes.count()]
            self._each(lambda name: objects.passed(self.store, f"{step}/{name}", files[name]), names)
        except ArgosyError as error:
            return error
        # Clients of object stores have classes of their own.
        except Exception as error:
            return ArgosyError(f"cannot be reached: {root_of(error)}", where=f"{self.store.root}/{step}")
        return None

    def _each(self, do: Any, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(REQUESTS, "object store") as pool:
            for one in [pool.submit(do, name) for name in names]:
                one.result()

    # ---------------------------------------------------------------- reading

    def _hold(self, step: int) -> None:
        """Fetches what describes a step."""
        self._let_go()

        def fetch() -> Held:
            folder = Path(tempfile.mkdtemp(prefix="argosy-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            held = Held(step, folder, objects.manifest_of(self.store, str(step)))
            self._fetch(held, filter(describes, held.files))
            return held

        self._held = processes.together("step described", fetch)

    def _let_go(self) -> None:
        if self._held is not None:
            shutil.rmtree(self._held.folder, ignore_errors=True)
            self._held = None

    def _fetch(self, held: Held, names: Iterable[str]) -> None:
        missing = [name for name in names if name in held.files and not (held.folder / name).exists()]
        self._each(lambda name: objects.passed(self.store, f"{held.step}/{name}", held.files[name], held.folder / name), missing)

    def path(self, step: int) -> Path:
        """The folder of the step that was agreed on. It has the shards that this process needs once `prepare` was called."""
        assert self._held is not None
        assert self._held.step == step
        return self._held.folder

    def prepare(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetches the shards that the devices of this process need. wanted: {item: {name: sharding}}.

        Raises:
            Damaged: one has changed since it was verified. OSError: there is no room for them. Elsewhere: in another process.
        """
        held = self._held
        assert held is not None
        assert held.step == step
        packed = any(shards.is_packed(held.folder, item) for item in wanted)
        names = list(held.files) if packed else shards.needed(held.folder, wanted)
        processes.together("shards fetched", lambda: self._fetch(held, names))

