"""Writes arrays in the Zarr 3 format, which Orbax and TensorStore can read completely or in parts. An array has one file of values, or
one file for each of its shards.

To write a checkpoint, Orbax needs all arrays in memory at once. Here they are written one after the other. A file holds the array, or a
shard of it, in C order, and then a table of chunks. Chunks are uncompressed, and divide the first axis, so that reading a part reads
only its chunks. Sources: zarr-specs, core 3.0 and the codec `sharding_indexed` 1.0. This module does not know what the arrays are for.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import Unsupported
from argosy.core.formats import Shape, TensorEntry, damaged_container, map_file
from argosy.core.formats.files import File, Order, of_text, slabs

CHUNK_BYTES = 1 << 24
DTYPES = frozenset(
    {"bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"}
    | {
        "float64",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)


def array_files(entry: TensorEntry) -> list[File]:
    """Describes the files of an array: its metadata and its values. Their names begin with the name of the array.

    Raises:
        Unsupported: the array has a type that Zarr does not have.
    """
    if entry.dtype.name not in DTYPES:
        raise Unsupported(f"checkpoints have no type for {entry.dtype}, of tensor `{entry.name}`")
    rows, chunks = _chunks(entry)
    files = [of_text(f"{entry.name}/zarr.json", json.dumps(_metadata(entry, rows, chunks)))]
    if math.prod(entry.shape):
        files.append(_values(entry, (0,) * len(entry.shape), rows, chunks))
    return files


def described_shards(name: str, shape: Shape, each: Shape, dtype: np.dtype) -> File:
    """Describes the file of metadata of an array whose shards `shard_file` describes.

    Args:
        name: the name of the array.
        shape: the shape of the array.
        each: the shape of a shard, which divides `shape`.
        dtype: the type of the array.

    Raises:
        Unsupported: the array has a type that Zarr does not have.
    """
    if dtype.name not in DTYPES:
        raise Unsupported(f"checkpoints have no type for {dtype}, of tensor `{name}`")
    shard = TensorEntry(name, each, dtype, lambda: np.empty(0))
    return of_text(f"{name}/zarr.json", json.dumps(_metadata(shard, *_shard_chunks(shard, shape)) | {"shape": list(shape)}))


def shard_file(shard: TensorEntry, at: tuple[int, ...], shape: Shape) -> File:
    """Describes the file of values of one shard.

    Args:
        shard: the shard, with the name of the array.
        at: the index of the shard in the grid of shards, along each axis.
        shape: the shape of the array.
    """
    return _values(shard, at, *_shard_chunks(shard, shape))


def _values(entry: TensorEntry, at: tuple[int, ...], rows: int, chunks: int) -> File:
    size = chunks * (_chunk_bytes(entry, rows) + 16)
    return File("/".join([entry.name, "c", *map(str, at)]), size, partial(_shard, entry, rows, chunks))


def describes(stored: Any, file: TensorEntry, chunks: int) -> bool:
    """Whether stored metadata are those of an array whose files each have the shape and type of `file`, and this number of chunks."""
    rows = file.shape[0] // chunks if file.shape else 1
    return stored == _metadata(file, rows, chunks) | {"shape": stored["shape"]}


def index_of(shape: Shape, dtype: np.dtype, chunks: int) -> bytes:
    """The table at the end of a file of values: the offset and the length of each chunk. `shape` is that of the values in the file,
    padding included."""
    size = math.prod(shape) * dtype.itemsize // chunks
    return np.stack([np.arange(chunks) * size, np.full(chunks, size)], axis=1).astype("<u8").tobytes()


def map_array(folder: Path) -> np.ndarray | None:
    """Maps the file of an array that `array_files` described, and returns a view of it. None: the array has another layout.

    Raises:
        Damaged: the length of the file differs from what its metadata say.
    """
    try:
        stored = json.loads((folder / "zarr.json").read_bytes())
        shape, dtype = tuple(stored["shape"]), np.dtype(stored["data_type"])
        entry = TensorEntry(folder.name, shape, dtype, lambda: np.empty(0))
        if not math.prod(shape) or stored != _metadata(entry, *_chunks(entry)):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    path = folder.joinpath("c", *("0" for _ in shape))
    data, (rows, chunks) = map_file(path), _chunks(entry)
    if len(data) != chunks * (_chunk_bytes(entry, rows) + 16):
        raise damaged_container(path, f"it has {len(data)} bytes, which is not the size of {list(shape)} of {dtype}")
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _chunks(entry: TensorEntry) -> tuple[int, int]:
    """The number of rows per chunk, and the number of chunks. The last chunk is padded with zeros."""
    if not math.prod(entry.shape):
        return 1, 1
    length = entry.shape[0] if entry.shape else 1
    row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    chunks = math.ceil(length / max(1, CHUNK_BYTES // row_bytes))
    rows = math.ceil(length / chunks)
    return rows, math.ceil(length / rows)


def _shard_chunks(entry: TensorEntry, shape: Shape) -> tuple[int, int]:
    """The same as `_chunks`, but if the array has several shards, the chunks divide a shard without padding."""
    if entry.shape == shape:
        return _chunks(entry)
    length = entry.shape[0] if entry.shape else 1
    least = _chunks(entry)[1]
    chunks = next(n for n in range(least, max(length, 1) + 1) if length % n == 0)
    return max(length, 1) // chunks, chunks


def _chunk_bytes(entry: TensorEntry, rows: int) -> int:
    return rows * math.prod(entry.shape[1:]) * entry.dtype.itemsize


def _metadata(entry: TensorEntry, rows: int, chunks: int) -> dict[str, Any]:
    rest = [max(1, n) for n in entry.shape[1:]]
    inner = [rows, *rest] if entry.shape else []
    outer = [rows * chunks, *rest] if entry.shape else []
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {"chunk_shape": inner, "codecs": [plain], "index_codecs": [plain]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(entry.shape),
        "data_type": entry.dtype.name,
        "fill_value": False if entry.dtype == bool else 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def _shard(entry: TensorEntry, rows: int, chunks: int, order: Order) -> Iterator[np.ndarray]:
    """Yields the content of a file of values: the values, zeros up to a full chunk, and the offset and length of each chunk."""
    size = _chunk_bytes(entry, rows)
    yield from slabs(entry, order)
    if missing := chunks * size - math.prod(entry.shape) * entry.dtype.itemsize:
        yield np.zeros(missing, np.uint8)
    yield np.frombuffer(index_of((chunks * size,), np.dtype(np.uint8), chunks), np.uint8)
