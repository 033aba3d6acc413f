"""A run's checkpoints: `checkpoints/<step>/` holds weights, optimizer, random streams, data position and settings, committed
together.

    weights/  state/      arrays, which Orbax can read; data/ too, where the position in the data has some
    meta.json             data position, settings, evaluation
    manifest.json         the hash of every file; written last, it makes the step a checkpoint

On a disk each array is a folder with a file of values, hashed while it is written (`step.shards`), in a folder beside the step's
that is renamed once its manifest is there. For an object store, where every file costs a request, Orbax packs the arrays into few
files in a scratch folder; they are hashed there and copied, the manifest last (`checkpoint.objects`). Readers take both.

This is the only module that uses Orbax (three functions of its v1 API). What Orbax lacks is implemented here: the manifest,
falling back past damaged checkpoints, and retention that never leaves part of a checkpoint looking complete.

Saving copies the arrays off the devices and writes in the background; the next save waits for the previous one.
"""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from argosy.checkpoint import objects
from argosy.checkpoint.saving.background import Saving
from argosy.checkpoint.saving.memory import Copies, Memory
from argosy.checkpoint.saving.pace import Pace, emptied
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import DATA, META, STATE, WEIGHTS, Arrays, catalog
from argosy.checkpoint.step.load import read_meta
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.files import of_text, sync
from argosy.core.storage import Store
from argosy.parallel import processes
from argosy.weights import manifest

__all__ = ["CheckpointSettings", "Checkpoints"]

# Steps with these endings are being removed, and being written.
REMOVED, WRITING = ".removed", ".writing"


class Checkpoints(Saving):
    """The checkpoints under a folder.

    Args:
        place: "checkpoints" of a run directory: a local folder, or a `Store`.
        settings: what to keep. None for readers, which never remove or rename anything.
        warn: called with a sentence when damage is found.
        memory: for the copies of a save.
    """

    def __init__(
        self,
        place: str | Path | Store,
        settings: CheckpointSettings | None = None,
        warn: Callable[[str], None] = lambda _: None,
        memory: Memory | None = None,
    ):
        super().__init__(warn, memory=memory)
        self.store = place if isinstance(place, Store) else Store(place)
        self.settings = settings
        self._fetched = objects.Fetched(self.store)

    # ---------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Committed steps, oldest first; unfinished ones are not included."""
        names = [name for name in self.store.list() if re.fullmatch(r"\d+", name)]
        return sorted(int(name) for name in names if self._is_committed(name))

    def path(self, step: int) -> Path:
        """A step's folder on this machine; a remote step is first copied to a scratch folder."""
        return self.store.local_path(str(step)) if self.store.is_local else self._fetched.path(str(step))

    def latest_good(self, above: int | None = None) -> int | None:
        """The newest step whose files match their manifest. above: a step that is good elsewhere; older ones are not looked at.

        With settings (the run's own process), damaged steps found on the way are renamed, and a step whose files were all written
        when the run was killed gets its name; a reader changes nothing. If a step is removed by retention while it is being read, the
        search starts again.

        Raises:
            ArgosyError: a step cannot be reached (permission, network); nothing is renamed for that.
            Damaged: there are checkpoints, but none is good. They are left as they are, so the next call raises the same error.
        """
        self._finish_renaming()
        steps = [step for step in self.steps() if above is None or step > above]
        damaged: dict[int, Damaged] = {}
        for step in reversed(steps):
            try:
                manifest.verify(self.path(step))
            except (Damaged, BadInput) as error:
                if not self._is_committed(str(step)):
                    return self.latest_good(above)
                # A step that cannot be reached (no permission, no network) may be good.
                if not isinstance(error, Damaged):
                    raise
                damaged[step] = error
                continue
            self._pass_by(damaged, step)
            return step
        self._none_good(steps, damaged, above)
        return None

    def _none_good(self, steps: list[int], damaged: Mapping[int, Damaged], above: int | None) -> None:
        """What follows where none of these steps is good."""
        if above is not None:
            self._pass_by(damaged, above)
        elif damaged:
            newest = damaged[steps[-1]]
            raise Damaged(
                f"all {len(steps)} checkpoints are damaged; the newest: {newest.what}",
                where=newest.where,
                hint="nothing was changed; restore a copy, or start again in another directory with dir=NEW",
            )

    def _finish_renaming(self) -> None:
        """Gives steps that have their manifest, which is written last, the names that a kill kept from them."""
        if self.settings is None or not self.store.is_local:
            return
        for pending in self.store.local_path().glob(f"*{WRITING}"):
            step = pending.name.removesuffix(WRITING)
            if (pending / manifest.NAME).exists() and not self._is_committed(step):
                # On a disk that nobody may write to it stays as it is.
                with suppress(OSError, ArgosyError):
                    self.store.remove(step)
                    _name(pending, pending.with_name(step))

    def _pass_by(self, damaged: Mapping[int, Damaged], used: int) -> None:
        for bad, damage in damaged.items():
            aside = f" and was set aside as {self._set_aside(bad)}" if self.settings is not None else ""
            self.warn(f"checkpoint {bad} is damaged{aside}: {damage.what} ({damage.where}); using step {used}")

    def agreed_good(self, above: int | None = None) -> int | None:
        """`latest_good`, looked for by the leader of several processes and known to all."""
        return processes.told("latest good", lambda: self.latest_good(above))

    def go_back(self) -> int | None:
        """`agreed_good`, for a run that makes other steps after it than before."""
        return self.agreed_good()

    def prepare(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Every process reads what it needs where it is."""

    def meta(self, step: int) -> dict[str, Any]:
        return read_meta(self.path(step))

    def eval_losses(self) -> dict[int, float]:
        """The evaluation loss of each kept step that was evaluated."""
        losses = {step: self._eval_loss(step) for step in self.steps()}
        return {step: loss for step, loss in losses.items() if loss is not None}

    def _seems_committed(self, step: int) -> bool:
        """Not where the store is away, which costs no run: saving fails then, and is tried again."""
        try:
            return self._is_committed(str(step))
        except ArgosyError:
            return False

    def _is_committed(self, name: str) -> bool:
        return self.store.exists(f"{name}/{manifest.NAME}")

    # ---------------------------------------------------------------- writing

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        """Starts a save and returns when the arrays are copied. `meta` is any JSON; data: arrays of the position in the data.

        If the previous save failed, that is reported and this one is still tried: a full disk may have space again.
        """
        self.settle(step)
        if self._seems_committed(step):
            return
        arrays = {WEIGHTS: weights, STATE: state} | ({DATA: data} if data else {})
        _start_copies(arrays)
        copies = self.memory.copies()
        on_host = shards.for_each(arrays, copies.of)
        self.start(self._write, step, on_host, copies, json.dumps(dict(meta), indent=1))

    def copied(self, weights: Arrays, state: Arrays) -> Counter[int]:
        return Counter(array.nbytes for array in (weights | state).values() if isinstance(array, jax.Array))

    def wait(self) -> None:
        """Waits until the save under way is committed.

        Raises:
            ArgosyError: the save failed; earlier checkpoints are intact.
        """
        self.wait_for(self.store.root)

    def _write(self, step: int, arrays: dict[str, Arrays], copies: Copies, meta: str) -> None:
        try:
            self._sweep()
            # What a kill left between the files and their manifest.
            self.store.remove(str(step))
            if self.store.is_local:
                write_step(self.path(step), arrays, meta, self._pace)
            else:
                with tempfile.TemporaryDirectory() as scratch:
                    pack_step(Path(scratch, str(step)), arrays, meta)
                    objects.upload(Path(scratch, str(step)), self.store, str(step))
            copies.release()
            self.retire_or_say(step)
        except BaseException as failure:
            self._failure = failure
            # It takes space that the next save may need. Where it cannot be removed either, it stays, without a manifest.
            with suppress(ArgosyError):
                if not self._is_committed(str(step)):
                    self.store.remove(str(step))
                self.store.remove(f"{step}{WRITING}")

    def _sweep(self) -> None:
        """Removes what a kill left: checkpoints that were being written, by Orbax too, or removed."""
        if self.store.is_local:
            folder = self.store.local_path()
            for left in [found for name in (f"*{WRITING}", f"*{REMOVED}", "*.orbax-checkpoint-tmp*") for found in folder.glob(name)]:
                shutil.rmtree(left, ignore_errors=True)
        else:
            objects.sweep(self.store)

    def lacks_all(self) -> bool:
        return not self.steps()

    def retire(self, newest: int) -> None:
        """Removes checkpoints that the settings do not keep, except one that is being read: that one is removed next time.

        What makes it a checkpoint is removed first (its name, or its manifest where nothing can be renamed), so a kill on the way
        leaves nothing that looks complete.
        """
        if self.settings is None:
            return
        steps = self.steps()
        keep = set(steps[-self.settings.keep :]) | {newest}
        if self.settings.keep_every:
            keep |= {s for s in steps if s % self.settings.keep_every == 0}
        if self.settings.keep_best:
            best = sorted((loss, s) for s, loss in self.eval_losses().items())
            keep |= {s for _, s in best[: self.settings.keep_best]}
        for step in set(steps) - keep:
            if not self.store.is_local:
                objects.retire(self.store, str(step))
                continue
            going = self.store.local_path(f"{step}{REMOVED}")
            with manifest.unread(self.path(step)) as free:
                if free:
                    self.path(step).rename(going)
            if free:
                emptied(going, self._pace)
                shutil.rmtree(going)

    def _eval_loss(self, step: int) -> float | None:
        """None if it was not evaluated or cannot be read: damage to an old checkpoint must not prevent a new one."""
        try:
            loss = json.loads(self.store.read_text(f"{step}/{META}")).get("eval_loss")
        except (ArgosyError, ValueError, AttributeError):
            return None
        return loss if isinstance(loss, int | float) else None

    def _set_aside(self, step: int) -> str:
        """Renames a damaged step instead of deleting it; returns its new name."""
        if not self.store.is_local:
            return objects.set_aside(self.store, str(step))
        aside = self.store.local_path(f"{step}.damaged")
        n = 1
        while aside.exists():
            n += 1
            aside = self.store.local_path(f"{step}.damaged-{n}")
        self.path(step).rename(aside)
        return aside.name


# ---------------------------------------------------------------- one checkpoint


def write_step(folder: Path, arrays: dict[str, Arrays], meta: str, pace: Pace | None = None) -> None:
    """Writes a step as a folder for each array, beside where it will be, and renames it."""
    pending = folder.with_name(folder.name + WRITING)
    files = [*shards.whole_files(arrays), *catalog(arrays), of_text(META, meta)]
    pending.mkdir(parents=True)
    manifest.commit(pending, dict(sorted(shards.write(pending, files, pace).items())))
    _name(pending, folder)


def _name(pending: Path, folder: Path) -> None:
    pending.rename(folder)
    sync(folder.parent)


def pack_step(folder: Path, arrays: dict[str, Arrays], meta: str) -> None:
    """Writes a step as Orbax does, in few files, which are read again for their hashes."""
    save_arrays(folder, arrays)
    (folder / META).write_text(meta)
    manifest.write(folder)


def save_arrays(folder: Path, items: dict[str, Arrays]) -> None:
    """Writes the arrays of a step. Without a manifest it is not a checkpoint yet."""
    # Where Orbax can make no folder, it leaves threads that wait for one for minutes, and the end of the process waits for them.
    if folder.parent.is_dir():
        probe = folder.with_name(f".{folder.name}.probe")
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    _orbax().save_checkpointables(folder.absolute(), items)


def _orbax() -> Any:
    """Orbax, imported late because that takes a second, with its internal warnings silenced."""
    import logging

    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.ERROR)
    return v1


def _start_copies(items: Mapping[str, Arrays]) -> None:
    """Starts all copies off the devices before waiting for the first, so that they overlap."""
    for arrays in items.values():
        for a in arrays.values():
            if hasattr(a, "copy_to_host_async") and getattr(a, "is_fully_addressable", True):
                a.copy_to_host_async()
