"""Reads parts of arrays in the layout of `zarr` directly into memory, several files at once. TensorStore copies them twice, and takes
twice as long.

A file of values holds an array, or a shard of it, in C order. So a part of complete rows is read at once. Other parts are copied from
the mapped file. TensorStore reads arrays with other metadata than `zarr` writes.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from argosy.core.formats import Shape, TensorEntry, damaged_container, map_file
from argosy.core.formats.zarr import describes, index_of
from argosy.core.process.cores import core_count

# The largest number of files that are read at once.
THREADS = 8
# The number of bytes that one thread reads at a time. Several threads read a large array.
PIECE_BYTES = 1 << 26
# On a CPU, XLA uses memory with this alignment directly, and copies other memory.
ALIGNED = 64

# The (begin, end) of a part of an array along each axis.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StoredArray:
    """An array on disk.

    folder: the folder of the array.
    shape, dtype: the shape and the type of the array.
    each: the shape of the part in one file. At the end of an axis it may reach beyond the array.
    chunks: the number of chunks in each file.
    """

    folder: Path
    shape: Shape
    dtype: np.dtype
    each: Shape
    chunks: int

    def cells(self, spans: Spans) -> Iterator[tuple[int, ...]]:
        """Yields the index, in the grid of files, of each file that holds some of a part."""
        if not all(stop > start for start, stop in spans):
            return
        yield from product(*(range(start // size, -(-stop // size)) for (start, stop), size in zip(spans, self.each, strict=True)))

    def file(self, at: tuple[int, ...]) -> Path:
        return self.folder.joinpath("c", *map(str, at))


def zarr_layout(folder: Path) -> StoredArray | None:
    """Reads the layout of a stored array; None if `zarr.array_files` or `zarr.shard_file` did not describe it."""
    try:
        stored = json.loads((folder / "zarr.json").read_bytes())
        shape, dtype = tuple(stored["shape"]), np.dtype(stored["data_type"])
        each = tuple(stored["chunk_grid"]["configuration"]["chunk_shape"])
        inner = stored["codecs"][0]["configuration"]["chunk_shape"]
        chunks = each[0] // inner[0] if each else 1
        if len(each) != len(shape) or not describes(stored, TensorEntry(folder.name, each, dtype, lambda: np.empty(0)), chunks):
            return None
        return StoredArray(folder, shape, dtype, each, chunks)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError):
        return None


def aligned_memory(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Allocates an array that XLA on a CPU can use without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNED, np.uint8)
    begin = -room.ctypes.data % ALIGNED
    return room[begin : begin + size].view(dtype).reshape(shape)


def read_parts(parts: Iterable[tuple[StoredArray, Spans, np.ndarray]]) -> None:
    """Reads parts of arrays on disk into arrays in memory, which are changed in place.

    Args:
        parts: (stored array, part to read, C-ordered array that is filled) for each part.

    Raises:
        Damaged: a file has another length than its metadata say, or does not hold its chunks in order.
        OSError: a file cannot be read.
    """
    pieces = [piece for array, spans, out in parts for piece in _pieces(array, spans, out)]
    # The largest pieces are read first, so that no thread has a large one left at the end.
    pieces.sort(key=lambda piece: -piece[3].nbytes)
    with ThreadPoolExecutor(min(THREADS, core_count()), "read") as pool:
        for _ in pool.map(_read, *zip(*pieces, strict=True)) if pieces else ():
            pass


def _pieces(array: StoredArray, spans: Spans, out: np.ndarray) -> Iterator[tuple[StoredArray, tuple[int, ...], Spans, np.ndarray]]:
    """Yields the pieces that are read at a time: (stored array, index of the file, part of the file, array that is filled)."""
    for at in array.cells(spans):
        begins = [i * size for i, size in zip(at, array.each, strict=True)]
        both = [(max(start, b), min(stop, b + n)) for (start, stop), b, n in zip(spans, begins, array.each, strict=True)]
        inside = tuple((start - b, stop - b) for (start, stop), b in zip(both, begins, strict=True))
        # The ellipsis makes the result a view also for an array without axes.
        into = out[(*(slice(start - s, stop - s) for (start, stop), (s, _) in zip(both, spans, strict=True)), ...)]
        rows = max(1, PIECE_BYTES * len(into) // into.nbytes) if into.ndim else 1
        for row in range(0, len(into) if into.ndim else 1, rows):
            part = inside if not into.ndim else ((inside[0][0] + row, min(inside[0][0] + row + rows, inside[0][1])), *inside[1:])
            yield array, at, part, into[row : row + rows] if into.ndim else into


def _read(array: StoredArray, at: tuple[int, ...], spans: Spans, into: np.ndarray) -> None:
    path, size = array.file(at), array.dtype.itemsize
    _check(array, path)
    whole = all(span == (0, n) for span, n in zip(spans[1:], array.each[1:], strict=True))
    if not (whole and into.flags.c_contiguous):
        values = map_file(path)[: math.prod(array.each) * size].view(array.dtype).reshape(array.each)
        into[...] = values[tuple(slice(*span) for span in spans)]
        return
    begin = spans[0][0] * math.prod(array.each[1:]) * size if spans else 0
    rest = into.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise damaged_container(path, "it ends early")
            rest = rest[count:]


def _check(array: StoredArray, path: Path) -> None:
    index = index_of(array.each, array.dtype, array.chunks)
    size = math.prod(array.each) * array.dtype.itemsize
    with path.open("rb", buffering=0) as file:
        if (file_bytes := os.fstat(file.fileno()).st_size) != size + len(index):
            raise damaged_container(path, f"it has {file_bytes} bytes, which is not the size of {list(array.each)} of {array.dtype}")
        file.seek(size)
        if file.read(len(index)) != index:
            raise damaged_container(path, "its chunks are not in order")
