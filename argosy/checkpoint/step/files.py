"""Writes files of a checkpoint into a folder, and hashes them while they are written."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.saving.pace import SavePace
from argosy.core.formats.files import File, sync, write_all
from argosy.weights import manifest

# Files with fewer bytes are synced to disk together, after all are written.
SMALL_BYTES = 1 << 20


def write_files(folder: Path, files: Iterable[File], pace: SavePace | None = None) -> manifest.Files:
    """Writes files to disk, and hashes them while they are written. Returns {name: size and hash}.

    Args:
        pace: limits the speed, to leave the cores to training. None writes at full speed.
    """
    files = list(files)
    hashes = {file.name: _write(folder / file.name, file, pace) for file in files}
    small = [folder / file.name for file in files if file.bytes < SMALL_BYTES]
    while small and pace is not None and pace.worked():
        sync(small.pop())
    # A small file mostly waits for the disk, which stores files faster if several are waited for at once.
    with ThreadPoolExecutor(manifest.THREADS, "sync") as pool:
        list(pool.map(sync, small))
    return hashes


def _write(path: Path, file: File, pace: SavePace | None) -> dict[str, Any]:
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as stream:
        for slab in file.slabs(np.ascontiguousarray):
            digest.update(slab.data)
            write_all(stream, slab)
            if pace is not None:
                pace.worked()
        if file.bytes >= SMALL_BYTES:
            os.fsync(stream.fileno())
    return {"bytes": file.bytes, "sha256": digest.hexdigest()}
