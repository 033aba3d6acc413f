"""Lists the runs on disk or in a store: their state, their progress, and whether they can resume. It only reads files, and imports no
jax.

Reading changes nothing: it takes no lock and renames nothing. A checkpoint is checked by its manifest and the sizes of its files,
which finds truncation at once; flipped bits are found when it is loaded, or here with `verify`.

A run is named by its folder or by its address (`gs://BUCKET/RUN`), which `Store` reads alike.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import CHECKPOINTS, SETTINGS, RunDirectory, check_run
from argosy.core.addresses import local_path
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.locks import LEASE_S, LOCK
from argosy.core.settings import diff, flatten, yaml_text_layer
from argosy.core.settings.explain import value_text
from argosy.core.storage import Missing, Store
from argosy.observe import metrics
from argosy.observe.life import Account, account
from argosy.weights import manifest

# The number of concurrent requests to a store.
REQUESTS = 16
DONE, CAN_RESUME, RUNNING, DAMAGED = "done", "can resume", "running", "damaged"
FINAL = ("loss", "reward", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "tokens", "tokens_per_s", "lr", "grad_norm")


@dataclass(frozen=True)
class Summary:
    """The summary of a run.

    path: the folder or address of the run.
    state: done, can resume, running or damaged.
    step: the step of the newest checkpoint.
    steps: the planned number of steps.
    numbers: the last value of each metric.
    written_s: the time of the last write, in seconds since 1970.
    checkpoints: the steps of the checkpoints.
    problem: the damage, None if there is none.
    life: the time of the run by cause.
    """

    path: Path | str
    state: str
    step: int | None
    steps: int | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    written_s: float | None = None
    checkpoints: tuple[int, ...] = ()
    problem: str | None = None
    life: Account | None = None

    def document(self) -> dict[str, Any]:
        """The summary as JSON."""
        life = {"life": self.life.document() if self.life else None}
        return vars(self) | {"path": str(self.path), "numbers": dict(self.numbers)} | life


def find(root: str | Path = "runs") -> list[Path | str]:
    """Finds the run directories under a folder, including the folder itself, the last written first. Under an address only the address
    itself and the directories directly under it are found, because walking through a bucket takes a request for each directory.

    Raises:
        BadInput: there is no such folder.
    """
    store = store_of(root)
    if not store.is_local:
        stores = [child for child in (store, *map(store.child, store.list())) if is_run(child.root)]
        return [child.root for child in sorted(stores, key=lambda child: -(last_write_s(child.root) or 0.0))]
    root = store.local_path()
    if not root.is_dir():
        hint = "`argosy train RECIPE` makes runs/RECIPE; `argosy runs FOLDER` looks elsewhere"
        raise BadInput(f"no folder {root}", hint=hint)
    folders = [Path(folder) for folder, inside, files in os.walk(root) if _is_run(inside, files)]
    return sorted(folders, key=lambda path: -(last_write_s(path) or 0.0))


def summary(path: str | Path, *, verify: bool = False) -> Summary:
    """Summarizes one run.

    Args:
        verify: whether to read every byte of every checkpoint.

        Raises:
            BadInput: it is not a run directory.
    """
    path = require(path)
    saved_steps, steps, problem = checkpoints(path), None, None
    try:
        steps = as_int(read_run_settings(path).get("steps"))
    except ArgosyError as error:
        problem = f"{SETTINGS}: {error.what}"
    for step in reversed(saved_steps) if verify else saved_steps[-1:]:
        problem = problem or trouble(path, step, verify)
    step = saved_steps[-1] if saved_steps else None
    state = DAMAGED if problem else DONE if step is not None and steps and step >= steps else CAN_RESUME
    state = RUNNING if state == CAN_RESUME and is_held(path) else state
    numbers, written = _last_numbers(path), last_write_s(path)
    return Summary(path, state, step, steps, numbers, written, tuple(saved_steps), problem, account(store_of(path)))


def read_run_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a run, from its settings.yml.

    Raises:
        UserError, Damaged: the file cannot be read.
    """
    return dict(yaml_text_layer(_settings_text(path), SETTINGS).values)


def _settings_text(path: str | Path) -> str:
    # An editor may have put a byte-order mark.
    return store_of(path).read_text(SETTINGS).removeprefix("\ufeff")


def settings(path: str | Path) -> list[tuple[str, Any, str]]:
    """The settings of a run from its settings.yml, as (key, value, who set it).

    Raises:
        UserError, Damaged: the file cannot be read.
    """
    text = _settings_text(path)
    layer, lines = yaml_text_layer(text, SETTINGS), text.splitlines()

    def setter(key: str) -> str:
        mark = layer.marks.get(key)
        line = lines[mark.line - 1] if mark and mark.line else ""
        return line.rpartition("  # ")[2].strip() if "  # " in line else ""

    return [(key, value, setter(key)) for key, value in flatten(layer.values).items()]


def compare(paths: Sequence[str | Path]) -> dict[str, Any]:
    """The settings in which runs differ, and the results of each: {key: [value, ...]} for both, in the order given.

    Raises:
        BadInput: fewer than two runs, or one is not a run directory.
    """
    if len(paths) < 2:
        raise BadInput("one run is not a comparison", hint="argosy runs compare A B")
    directories = [require(path) for path in paths]
    values = [read_run_settings(path) for path in directories]
    keys = [key for other in values[1:] for key, _, _ in diff(values[0], other) if key != "dir"]
    flat = [flatten(v) for v in values]
    ends = [summary(path) for path in directories]
    numbers: dict[str, list[Any]] = {"state": [end.state for end in ends], "step": [end.step for end in ends]}
    for name in FINAL:
        if any(name in end.numbers for end in ends):
            numbers[name] = [end.numbers.get(name) for end in ends]
    differ = {key: [f.get(key) for f in flat] for key in dict.fromkeys(keys)}
    return {"runs": [str(path) for path in directories], "settings": differ, "numbers": numbers}


# ---------------------------------------------------------------- files


def store_of(path: str | Path) -> Store:
    return Store(local_path(path))


def require(path: str | Path) -> Path | str:
    """Returns the path of a run directory, or its address, after a check.

    Raises:
        BadInput: this is not a run directory.
    """
    store, hint = store_of(path), "`argosy runs` lists those under runs/"
    if not store.is_local:
        check_run(store)
        return store.root.rstrip("/")
    path = store.local_path()
    if not path.is_dir():
        raise BadInput(f"no run at {path}", hint=hint)
    if not is_run(path):
        raise BadInput(f"{path} is not a run directory: it has no {SETTINGS}", hint=hint)
    return path


def is_run(path: str | Path) -> bool:
    """Whether this is a run directory. A local folder that only has settings is not one."""
    store = store_of(path)
    if not store.is_local:
        return store.exists(SETTINGS)
    path = store.local_path()
    return path.is_dir() and _is_run(os.listdir(path), os.listdir(path))


def checkpoints(path: str | Path) -> list[int]:
    """Returns the committed steps, oldest first."""
    return RunDirectory(path).steps()


def size_bytes(path: str | Path, step: int) -> int:
    """Returns the bytes of one checkpoint, from its manifest.

    Raises:
        Damaged: the manifest differs from what was written.
    """
    return sum(file["bytes"] for file in _files_of(store_of(path), step).values())


def _files_of(store: Store, step: int) -> dict[str, Any]:
    """Reads the manifest of a checkpoint."""
    name = f"{CHECKPOINTS}/{step}"
    if store.is_local:
        return manifest.read_manifest(store.local_path(name))
    # It imports numpy, which takes a moment.
    from argosy.checkpoint.medium.objects import fetch_manifest

    return fetch_manifest(store, name)


def trouble(path: str | Path, step: int, verify: bool = False) -> str | None:
    """Checks a checkpoint: its manifest and the names and sizes of its files, with `verify` also every byte. Returns the problem, or
    None."""
    store = store_of(path)
    try:
        files = _files_of(store, step)
        if not store.is_local:
            return _trouble_elsewhere(store, step, files, verify)
        folder = store.local_path(f"{CHECKPOINTS}/{step}")
        if verify:
            manifest.verify_folder(folder)
        for name, expected in files.items():
            if not (folder / name).is_file():
                return f"checkpoint {step}: {name} is missing"
            if (folder / name).stat().st_size != expected["bytes"]:
                return f"checkpoint {step}: {name} has {(folder / name).stat().st_size} bytes, not {expected['bytes']}"
    except Damaged as damage:
        return f"checkpoint {step}: {damage.what}"
    return None


def _trouble_elsewhere(store: Store, step: int, files: Mapping[str, Any], verify: bool) -> str | None:
    """Checks a checkpoint in a store as `trouble` does, several files at a time, without keeping them.

    Raises:
        Damaged: a byte differs, or a file is missing.
    """
    from argosy.checkpoint.medium.objects import download

    def of(name: str) -> str | None:
        path, expected = f"{CHECKPOINTS}/{step}/{name}", files[name]
        try:
            size = store.size(path)
            if size == expected["bytes"] and verify:
                download(store, path, expected)
        except Missing:
            return f"checkpoint {step}: {name} is missing"
        except Damaged:
            return f"checkpoint {step}: {name} differs from what was written: its SHA-256 is another"
        return f"checkpoint {step}: {name} has {size} bytes, not {expected['bytes']}" if size != expected["bytes"] else None

    with ThreadPoolExecutor(REQUESTS, "object store") as pool:
        return next(filter(None, pool.map(of, files)), None)


def is_held(path: str | Path) -> bool:
    """Whether a process holds the run: for a local run a process of this machine, by its lock file; for a run in a store any process
    that renews its lease.
    """
    store = store_of(path)
    try:
        holder = json.loads(store.read_text(LOCK))
        if holder["host"] != socket.gethostname():
            return not store.is_local and time.time() - holder["renewed"] < LEASE_S
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        # The process exists and belongs to another user.
        return True
    except (ArgosyError, OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _last_numbers(path: str | Path) -> dict[str, float]:
    """Returns the last value of each metric."""
    lines = [line for line in metrics.read(store_of(path)) if as_int(line.get("step")) is not None]
    by_name = {name: metrics.by_step(lines, name) for name in FINAL}
    last = {name: values[max(values)] for name, values in by_name.items() if values}
    return {name: float(v) for name, v in last.items() if isinstance(v, int | float) and math.isfinite(v)}


def last_write_s(path: str | Path) -> float | None:
    """Returns the time of the run's last write, in seconds since 1970."""
    store = store_of(path)
    times = [store.written_s(name) for name in (metrics.FILE, SETTINGS) if store.exists(name)]
    return max((seconds for seconds in times if seconds is not None), default=None)


def as_int(value: Any) -> int | None:
    """Returns the value if it is an integer, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def table_text(value: Any) -> str:
    """Formats a setting or a number for a table."""
    return f"{value:.6g}" if isinstance(value, float) else value_text(value)


def _is_run(inside: Sequence[str], files: Sequence[str]) -> bool:
    return SETTINGS in files and (metrics.FILE in files or CHECKPOINTS in inside or LOCK in files)
