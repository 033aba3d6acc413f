"""Whether the disk of a run has room for its checkpoints, asked before the first step: a run whose disk is full trains for hours, and
nothing of it is left.

Quotas, and what others write meanwhile, are not known here.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.core.errors import BadInput
from argosy.observe.readable import sized


def check_disk(assembly: Any, folder: Path, steps: int, say: Callable[[str], None]) -> None:
    """Checks that there is room for one checkpoint. Says where there is none for all that are kept.

    Args:
        folder: of the run. steps: checkpoints that are there already.

    Raises:
        BadInput: there is not.
    """
    how, one = assembly.run.checkpoint, checkpoint_bytes(assembly)
    check_room(folder, one, "dir=NEW on another disk")
    if how.local is not None:
        check_room(Path(how.local).expanduser(), one // jax.process_count(), "checkpoint.local=FOLDER on another disk")
    # The next one is written before the oldest goes.
    kept = how.keep + (how.keep_best if assembly.evals is not None else 0) + 1 - steps
    if free_bytes(folder) < kept * one:
        say(
            f"disk        {how.keep + how.keep_best} checkpoints of {sized(one)} are kept, and one more is written before the oldest "
            f"goes: they do not fit into the {sized(free_bytes(folder))} that are free. Free some space, or lower checkpoint.keep"
        )


def check_room(folder: Path, need: int, elsewhere: str) -> None:
    """Checks that so many bytes are free where a folder is, or will be.

    Raises:
        BadInput: they are not.
    """
    free = free_bytes(folder)
    if free < need:
        what = f"a checkpoint takes {sized(need)}, and the disk of {folder} has {sized(free)} free"
        raise BadInput(what, hint=f"free some space, or {elsewhere}")


def checkpoint_bytes(assembly: Any) -> int:
    """The bytes of the arrays of a checkpoint."""
    stored = jax.eval_shape(assembly.packed, assembly.shapes)
    return sum(int(np.prod(a.shape, dtype=np.int64)) * a.dtype.itemsize for a in jax.tree.leaves(stored))


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there. The folder itself may not exist yet."""
    return shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free
