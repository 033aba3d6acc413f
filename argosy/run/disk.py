"""Checks before the first step that the disk has room for a run's checkpoints. Otherwise a run could train for hours and save nothing.

Disk quotas and writes of other programs are not taken into account.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.core.errors import BadInput
from argosy.observe.readable import format_bytes


def check_disk(assembly: Any, folder: Path, steps: int, say: Callable[[str], None]) -> None:
    """Checks that there is room for one checkpoint. Reports if there is not enough room for all checkpoints that are kept.

    Args:
        folder: the run directory.
        steps: the number of checkpoints that exist already.
        say: called with the report.

    Raises:
        BadInput: there is no room for a checkpoint.
    """
    settings, checkpoint_size = assembly.run.checkpoint, checkpoint_bytes(assembly)
    check_room(folder, checkpoint_size, "dir=NEW on another disk")
    if settings.local is not None:
        check_room(Path(settings.local).expanduser(), checkpoint_size // jax.process_count(), "checkpoint.local=FOLDER on another disk")
    # The next one is written before the oldest goes.
    count = settings.keep + (settings.keep_best if assembly.evals is not None else 0) + 1 - steps
    if free_bytes(folder) < count * checkpoint_size:
        say(
            f"disk        {settings.keep + settings.keep_best} checkpoints of {format_bytes(checkpoint_size)} are kept, and one more "
            f"is written before the oldest goes: they do not fit into the {format_bytes(free_bytes(folder))} that are free. "
            "Free some space, or lower checkpoint.keep"
        )


def check_room(folder: Path, need: int, elsewhere: str) -> None:
    """Checks that the disk of a folder has this much free space.

    Args:
        folder: a folder, which may not exist yet.
        need: the free space that is needed, in bytes.
        elsewhere: the part of the error's hint that names a setting for another place.

    Raises:
        BadInput: there is too little space.
    """
    free = free_bytes(folder)
    if free < need:
        problem = f"a checkpoint takes {format_bytes(need)}, and the disk of {folder} has {format_bytes(free)} free"
        raise BadInput(problem, hint=f"free some space, or {elsewhere}")


def checkpoint_bytes(assembly: Any) -> int:
    """Computes the size of the arrays of a checkpoint, in bytes."""
    stored = jax.eval_shape(assembly.packed, assembly.shapes)
    return sum(int(np.prod(a.shape, dtype=np.int64)) * a.dtype.itemsize for a in jax.tree.leaves(stored))


def free_bytes(folder: Path) -> int:
    """Returns the free space for this user on the disk of a folder, in bytes. The folder itself may not exist yet."""
    return shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free
