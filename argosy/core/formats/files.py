"""Files about to be written: a name, a size known beforehand, and the bytes a slab at a time.

Notable: since sizes are known before the first byte, space can be checked, and a file that a kill left short is told from
one that is whole. A tensor is never copied as a whole: what is transposed is put in order slab by slab.
Knows neither where the files go nor what is in them: `safetensors` and `zarr` lay them out, `checkpoint.partial` writes.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import Entry, Shape

SLAB_BYTES = 1 << 23  # the allocator hands these out again; of 32 MB, each would be new pages from the system

Order = Callable[[np.ndarray], np.ndarray]  # the same numbers, one after the other in memory


class File(NamedTuple):
    """`slabs` is called once, when its turn has come, with the way to put an array in order; it gives uint8 arrays."""

    name: str
    bytes: int
    slabs: Callable[[Order], Iterator[np.ndarray]]


def of_bytes(name: str, data: bytes) -> File:
    """A small file, whole."""
    return File(name, len(data), lambda order: iter([np.frombuffer(data, np.uint8)]))


def of_text(name: str, text: str) -> File:
    return of_bytes(name, text.encode("utf-8"))


def write_file(path: Path, file: File, order: Order = np.ascontiguousarray) -> None:
    """Writes it here and now: it is there whole, or not at all."""
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
    """Forces a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(folder: Path, needed: int) -> None:
    """That so many bytes fit, in a folder that need not be there yet.

    Raises:
        BadInput: they do not.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        numbers = f"{needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free"
        raise BadInput(numbers, where=f"in {place}", hint="free some space, or name a folder on another disk")


def write_all(out: BinaryIO, slab: np.ndarray) -> None:
    """Linux writes at most 2 GB at a call, and less when it likes."""
    left = slab.data
    while left:
        left = left[out.write(left) :]


def slabs(entry: Entry, order: Order) -> Iterator[np.ndarray]:
    """A tensor's bytes in C order, whole or part by part.

    Raises:
        ValueError: it came otherwise than announced.
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
    """The array cut along its first axes, in C order, into pieces of at most so many bytes (one number at least)."""
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
