"""The runs on disk: what each is, how far it got, whether it can resume. Reads only files, and imports no jax.

Reading changes nothing: it takes no lock and renames nothing. A checkpoint is checked by its manifest and the sizes of its files,
which finds truncation at once; flipped bits are found when it is loaded, or here with `verify`.
"""

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.checkpoint import manifest
from argosy.checkpoint.run_directory import CHECKPOINTS, SETTINGS, RunDirectory
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.explain import value_text
from argosy.core.settings import diff, flatten, yaml_layer
from argosy.core.storage import LOCK, Store
from argosy.observe import metrics
from argosy.observe.life import Account, account

DONE, CAN_RESUME, RUNNING, DAMAGED = "done", "can resume", "running", "damaged"
FINAL = ("loss", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "tokens", "tokens_per_s", "lr", "grad_norm")


@dataclass(frozen=True)
class Summary:
    """A run at a glance. step: of the newest checkpoint. numbers: the last value of each. problem: what is damaged. life: where its
    time went."""

    path: Path
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


def find(root: str | Path = "runs") -> list[Path]:
    """The run directories under a folder, including the folder itself, last written first.

    Raises:
        BadInput: there is no such folder.
    """
    _is_here(root)
    root = Path(root)
    if not root.is_dir():
        hint = "`argosy train RECIPE` makes runs/RECIPE; `argosy runs FOLDER` looks elsewhere"
        raise BadInput(f"no folder {root}", hint=hint)
    found = [Path(folder) for folder, inside, files in os.walk(root) if _is_run(inside, files)]
    return sorted(found, key=lambda path: -(written_s(path) or 0.0))


def summary(path: str | Path, *, verify: bool = False) -> Summary:
    """Summarizes one run.

    Args:
        verify: whether to read every byte of every checkpoint.

        Raises:
            BadInput: it is not a run directory.
    """
    path = require(path)
    kept, steps, problem = checkpoints(path), None, None
    try:
        steps = as_int(dict(yaml_layer(path / SETTINGS).values).get("steps"))
    except ArgosyError as error:
        problem = f"{SETTINGS}: {error.what}"
    for step in reversed(kept) if verify else kept[-1:]:
        problem = problem or trouble(path, step, verify)
    step = kept[-1] if kept else None
    state = DAMAGED if problem else DONE if step is not None and steps and step >= steps else CAN_RESUME
    state = RUNNING if state == CAN_RESUME and is_held(path) else state
    return Summary(path, state, step, steps, last_numbers(path), written_s(path), tuple(kept), problem, account(Store(path)))


def settings(path: Path) -> list[tuple[str, Any, str]]:
    """(key, value, who set it) of a run, from its settings.yml.

    Raises:
        BadInput, SettingsError: the file cannot be read.
    """
    layer = yaml_layer(path / SETTINGS)
    lines = (path / SETTINGS).read_text(encoding="utf-8-sig").splitlines()

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
    found = [require(path) for path in paths]
    values = [dict(yaml_layer(path / SETTINGS).values) for path in found]
    keys = [key for other in values[1:] for key, _, _ in diff(values[0], other) if key != "dir"]
    flat = [flatten(v) for v in values]
    ends = [summary(path) for path in found]
    numbers: dict[str, list[Any]] = {"state": [end.state for end in ends], "step": [end.step for end in ends]}
    for name in FINAL:
        if any(name in end.numbers for end in ends):
            numbers[name] = [end.numbers.get(name) for end in ends]
    differ = {key: [f.get(key) for f in flat] for key in dict.fromkeys(keys)}
    return {"runs": [str(path) for path in found], "settings": differ, "numbers": numbers}


# ---------------------------------------------------------------- files


def _is_here(path: str | Path) -> None:
    if "://" in str(path):
        raise BadInput(f"{path} is not on this machine", hint="copy it into a folder first, such as runs/copy")


def require(path: str | Path) -> Path:
    """The path of a run directory.

    Raises:
        BadInput: it is not a run directory.
    """
    _is_here(path)
    path, hint = Path(path), "`argosy runs` lists those under runs/"
    if not path.is_dir():
        raise BadInput(f"no run at {path}", hint=hint)
    if not _is_run(os.listdir(path), os.listdir(path)):
        raise BadInput(f"{path} is not a run directory: it has no {SETTINGS}", hint=hint)
    return path


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run directory."""
    return Path(path).is_dir() and _is_run(os.listdir(path), os.listdir(path))


def checkpoints(path: Path) -> list[int]:
    """Committed steps, oldest first."""
    return RunDirectory(path).steps()


def size_bytes(path: Path, step: int) -> int:
    """Bytes of one checkpoint, from its manifest.

    Raises:
        Damaged: the manifest differs from what was written.
    """
    return sum(file["bytes"] for file in manifest.read(path / CHECKPOINTS / str(step)).values())


def trouble(path: Path, step: int, verify: bool = False) -> str | None:
    """What is wrong with a checkpoint: its manifest, a missing file, a size; with `verify`, any byte. None if nothing is."""
    folder = path / CHECKPOINTS / str(step)
    try:
        if verify:
            manifest.verify(folder)
        for name, expected in manifest.read(folder).items():
            if not (folder / name).is_file():
                return f"checkpoint {step}: {name} is missing"
            if (folder / name).stat().st_size != expected["bytes"]:
                return f"checkpoint {step}: {name} has {(folder / name).stat().st_size} bytes, not {expected['bytes']}"
    except Damaged as damage:
        return f"checkpoint {step}: {damage.what}"
    return None


def is_held(path: Path) -> bool:
    """Whether a process of this machine holds the run, according to its lock file."""
    try:
        holder = json.loads((path / LOCK).read_text())
        if holder["host"] != socket.gethostname():
            return False
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        # The process exists and belongs to another user.
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def last_numbers(path: Path) -> dict[str, float]:
    """The last value written for each number, by step."""
    lines = [line for line in metrics.read(Store(path)) if as_int(line.get("step")) is not None]
    found = {name: metrics.by_step(lines, name) for name in FINAL}
    last = {name: values[max(values)] for name, values in found.items() if values}
    return {name: float(v) for name, v in last.items() if isinstance(v, int | float) and math.isfinite(v)}


def written_s(path: Path) -> float | None:
    """When the run last wrote, in seconds since 1970."""
    times = [(path / name).stat().st_mtime for name in (metrics.FILE, SETTINGS) if (path / name).exists()]
    return max(times, default=None)


def as_int(value: Any) -> int | None:
    """The value if it is a whole number, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shown(value: Any) -> str:
    """A setting or a number as text for a table."""
    return f"{value:.6g}" if isinstance(value, float) else value_text(value)


def _is_run(inside: Sequence[str], files: Sequence[str]) -> bool:
    return SETTINGS in files and (metrics.FILE in files or CHECKPOINTS in inside or LOCK in files)
