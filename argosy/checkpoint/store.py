"""A run's checkpoints: `checkpoints/<step>/` with weights, optimizer, random streams, data position and settings in one commit.

    weights/  state/      arrays, written by Orbax
    meta.json             data position, settings, evaluation
    manifest.json         the hash of every file; it is written last, and makes the checkpoint one

The door to Orbax (its v1 API, through three functions of it). What it lacks is here: the manifest, going back past damage,
and retention that can never leave half a checkpoint looking whole.

Saving copies the arrays off the devices, then writes in the background; the next save waits for the one before.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from argosy.checkpoint import manifest
from argosy.checkpoint.settings import CheckpointSettings
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats import Entry
from argosy.core.formats.files import File, of_text
from argosy.core.formats.zarr import array_files

Arrays = dict[str, Any]  # {name: array}
WEIGHTS, STATE, META = "weights", "state", "meta.json"
REMOVED = ".removed"  # a step under this ending is on its way out


class Checkpoints:
    """The checkpoints under a folder.

    Args:
        folder: "checkpoints" of a run directory.
        settings: what to keep; nothing is ever removed where None.
        warn: told, in words, when damage is found.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: CheckpointSettings | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ):
        self.folder, self.settings, self.warn = Path(folder), settings, warn
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    # ---------------------------------------------------------------- what there is

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Those that a kill left unfinished are not among them."""
        if not self.folder.is_dir():
            return []
        found = [
            int(d.name) for d in self.folder.iterdir() if re.fullmatch(r"\d+", d.name) and (d / manifest.NAME).exists()
        ]
        return sorted(found)

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def latest_good(self) -> int | None:
        """The newest step whose files are what was written. Where settings say what to keep, this is the run's own process,
        and damaged steps on the way are set aside under another name; whoever only reads changes nothing.

        Raises:
            Damaged: there are checkpoints, and none of them is good. They stay as they are, so the next call says so too.
        """
        steps = self.steps()
        damaged: dict[int, Damaged] = {}
        for step in reversed(steps):
            try:
                manifest.verify(self.path(step))
            except Damaged as damage:
                damaged[step] = damage
                continue
            for bad, damage in damaged.items():
                aside = f" and was set aside as {self._set_aside(bad).name}" if self.settings is not None else ""
                self.warn(f"checkpoint {bad} is damaged{aside}: {damage.what} ({damage.where})")
            return step
        if damaged:
            newest = damaged[steps[-1]]
            raise Damaged(
                f"none of the {len(steps)} checkpoints is what was written; of the newest, {newest.what}",
                where=newest.where,
                hint="nothing was changed; bring back a copy, or start again in another directory with dir=NEW",
            )
        return None

    def meta(self, step: int) -> dict[str, Any]:
        return read_meta(self.path(step))

    # ---------------------------------------------------------------- writing

    def save(self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any]) -> None:
        """Starts to save; returns when the arrays are copied. `meta` is anything that is JSON.

        Where the save before this one failed, that is told and this one is tried: a full disk may have room again.
        """
        self.join()
        if self._failure is not None:
            self.warn(f"a checkpoint could not be written: {_root(self._failure)}; trying again with step {step}")
            self._failure = None
        target = self.path(step)
        if (target / manifest.NAME).exists():
            return
        if target.exists():  # a kill between the files and their manifest
            shutil.rmtree(target)
        arrays = {WEIGHTS: _off_device(weights), STATE: _off_device(state)}
        job = (step, target, arrays, json.dumps(dict(meta), indent=1))
        self._writing = threading.Thread(target=self._write, args=job, name=f"checkpoint-{step}")
        self._writing.start()

    def join(self) -> None:
        """Until nothing is being written. That it failed is left for `wait` to say."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def wait(self) -> None:
        """Until the save under way is committed.

        Raises:
            ArgosyError: it failed; earlier checkpoints are untouched.
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise ArgosyError(
                f"a checkpoint could not be written: {_root(failure)}",
                where=str(self.folder),
                hint="earlier checkpoints are untouched; free some space or mend the permissions, and run the same command",
            ) from failure

    def _write(self, step: int, target: Path, arrays: dict[str, Arrays], meta: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            save_arrays(target, arrays)
            (target / META).write_text(meta)
            manifest.write(target)
            self._retire(step)
        except BaseException as failure:
            self._failure = failure
            if not (target / manifest.NAME).exists():  # it holds room that the next save may need
                shutil.rmtree(target, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what a kill left: temporary folders of Orbax, and checkpoints that were being removed."""
        for left in [*self.folder.glob("*.orbax-checkpoint-tmp*"), *self.folder.glob(f"*{REMOVED}")]:
            shutil.rmtree(left, ignore_errors=True)

    def _retire(self, newest: int) -> None:
        """Removes what the settings do not keep. The name goes first: a half-removed checkpoint is then no checkpoint."""
        if self.settings is None:
            return
        steps = self.steps()
        keep = set(steps[-self.settings.keep :]) | {newest}
        if self.settings.keep_every:
            keep |= {s for s in steps if s % self.settings.keep_every == 0}
        if self.settings.keep_best:
            losses = {s: self._eval_loss(s) for s in steps}
            judged = sorted((loss, s) for s, loss in losses.items() if loss is not None)
            keep |= {s for _, s in judged[: self.settings.keep_best]}
        for step in set(steps) - keep:
            going = self.folder / f"{step}{REMOVED}"
            self.path(step).rename(going)
            shutil.rmtree(going)

    def _eval_loss(self, step: int) -> float | None:
        """None where it was not evaluated, or cannot be read: damage to an old checkpoint must not stop a new one."""
        try:
            return self.meta(step).get("eval_loss")
        except Damaged:
            return None

    def _set_aside(self, step: int) -> Path:
        aside = self.folder / f"{step}.damaged"
        n = 1
        while aside.exists():
            n += 1
            aside = self.folder / f"{step}.damaged-{n}"
        self.path(step).rename(aside)
        return aside


# ---------------------------------------------------------------- one checkpoint


def save_arrays(folder: Path, items: dict[str, Arrays]) -> None:
    """Writes the arrays of a checkpoint that is not one yet: its manifest makes it so."""
    _orbax().save_checkpointables(folder.absolute(), items)


def array_by_array(entries: Iterable[Entry], item: str = WEIGHTS) -> list[File]:
    """An item of a checkpoint as files that can be written one after the other, where `save_arrays` needs all arrays in
    memory at once. Orbax reads both alike; here arrays are not compressed.

    Raises:
        Unsupported: a type that checkpoints have no name for.
    """
    entries = list(entries)
    files = [file for entry in entries for file in array_files(entry)]
    about = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        f"('{entry.name}',)": {"key_metadata": [{"key": entry.name, "key_type": 2}], "value_metadata": about}
        for entry in entries
    }
    layout = {"use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    handler = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
    times = {"init_timestamp_nsecs": None, "commit_timestamp_nsecs": None}
    checkpoint = {"item_handlers": {item: handler}, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
    described = {"tree_metadata": tree, **layout, "custom_metadata": None}
    return [
        *(file._replace(name=f"{item}/{file.name}") for file in files),
        of_text(f"{item}/_METADATA", json.dumps(described)),
        of_text("_CHECKPOINT_METADATA", json.dumps(checkpoint | times)),
    ]


def read_meta(folder: Path) -> dict[str, Any]:
    """What was saved beside the arrays.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: it cannot be read.
    """
    return _guarded(folder, lambda: json.loads((folder / META).read_text()))


def stored_shapes(folder: Path, item: str = WEIGHTS) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and types of one item, without reading it.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: it cannot be read, or holds no such item.
    """
    items = _guarded(folder, lambda: _orbax().checkpointables_metadata(folder.absolute()).metadata)
    described = items.get(item)
    if described is None:
        raise Damaged(f"its {item} cannot be read", where=str(folder))
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in described.items()}


def load_weights(folder: Path, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    """The weights alone, onto these shardings; on the host's first device where none are given."""
    return load_item(folder, WEIGHTS, shardings, dtype)


def load_item(folder: Path, item: str, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    here = SingleDeviceSharding(_host())
    wanted = {
        name: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=shardings[name] if shardings else here)
        for name, a in stored_shapes(folder, item).items()
    }
    return _guarded(folder, lambda: _orbax().load_checkpointables(folder.absolute(), {item: wanted})[item])


def _host() -> Any:
    """The host's device, whatever computes: a model that is split over devices need not fit on one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others only
        return jax.local_devices()[0]


def _orbax() -> Any:
    """Orbax, which takes a second to import, and whose warnings speak of its own insides."""
    import logging

    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.ERROR)
    return v1


def _guarded(folder: Path, read: Callable[[], Any]) -> Any:
    """Orbax hides what is wrong with a file behind a missing key; this says it."""
    if not folder.is_dir():
        raise BadInput(f"no checkpoint at {folder}")
    try:
        return read()
    except Exception as failure:
        raise Damaged(f"cannot be read: {_root(failure)}", where=str(folder)) from failure


def _root(failure: BaseException) -> str:
    """The first line of the innermost cause."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:200]


def _off_device(arrays: Arrays) -> Arrays:
    """Copies on the host where the array is whole on this process; the loop may then give its buffers away."""
    return {name: np.array(a) if getattr(a, "is_fully_addressable", True) else a for name, a in arrays.items()}
