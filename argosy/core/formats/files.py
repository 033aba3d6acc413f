"""Describes files to be written: a name, a size known beforehand, and the bytes in slabs, which are parts of a few MiB.

Sizes are known before the first byte is written, so disk space can be checked, and a file that was cut short by a kill can be
recognized. No tensor is copied as a whole: transposed tensors are made contiguous slab by slab. This module knows neither where the
files are written nor what they hold: `safetensors` and `zarr` lay them out, and `weights.staging` writes them.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import Shape, TensorEntry

# The allocator reuses memory of this size. Slabs of 32 MB would be new pages from the system each time.
SLAB_BYTES = 1 << 23

# Returns the same numbers, contiguous in memory.
Order = Callable[[np.ndarray], np.ndarray]


class File(NamedTuple):
    """A file to be written.

    name: the name of the file.
    bytes: the size of the file.
    slabs: yields the content as uint8 arrays. It is called once, when the file is written, with the function that makes an array
        contiguous.
    """

    name: str
    bytes: int
    slabs: Callable[[Order], Iterator[np.ndarray]]


def of_bytes(name: str, data: bytes) -> File:
    """A small file with this content."""
    return File(name, len(data), lambda order: iter([np.frombuffer(data, np.uint8)]))


def of_text(name: str, text: str) -> File:
    return of_bytes(name, text.encode("utf-8"))


def write_file(path: Path, file: File, order: Order = np.ascontiguousarray) -> None:
    """Writes a file immediately, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pending.open("wb", buffering=0) as out:
            for slab in file.slabs(order):
                write_all(out, slab)
            os.fsync(out.fileno())
        pending.rename(path)
    finally:
        pending.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Forces a file, or the list of names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(folder: Path, needed: int) -> None:
    """Checks that `needed` bytes fit on the disk of a folder that may not exist yet.

    Raises:
        BadInput: there is not enough space.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        numbers = f"{needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free"
        raise BadInput(numbers, where=f"in {place}", hint="free some space, or name a folder on another disk")


def write_all(out: BinaryIO, slab: np.ndarray) -> None:
    """Writes all bytes of a slab. Linux writes at most 2 GB per call, and sometimes less."""
    rest = slab.data
    while rest:
        rest = rest[out.write(rest) :]


def slabs(entry: TensorEntry, order: Order) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor in C order, as uint8 slabs.

    Raises:
        ValueError: the tensor differs from the shape or type of its entry.
    """
    if entry.parts is None:
        yield from _in_slabs(entry.name, entry.make(), entry.shape, entry.dtype, order)
        return
    count = 0
    for part in entry.parts():
        count += 1
        yield from _in_slabs(entry.name, part, entry.shape[1:], entry.dtype, order)
    if count != entry.shape[0]:
        raise ValueError(f"`{entry.name}` came in {count} parts, announced as {entry.shape}")


def _in_slabs(name: str, values: np.ndarray, shape: Shape, dtype: np.dtype, order: Order) -> Iterator[np.ndarray]:
    array = np.asarray(values)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"`{name}` came as {array.dtype} {array.shape}, announced as {dtype} {shape}")
    for piece in pieces(array, SLAB_BYTES):
        yield order(piece).reshape(-1).view(np.uint8)


def pieces(array: np.ndarray, most_bytes: int) -> Iterator[np.ndarray]:
    """Cuts an array along its first axes, in C order, into pieces of at most `most_bytes` bytes, but at least one number."""
    if array.nbytes <= most_bytes or array.ndim == 0:
        yield array
        return
    rows = most_bytes * len(array) // array.nbytes
    if rows == 0:
        for row in array:
            yield from pieces(row, most_bytes)
        return
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
