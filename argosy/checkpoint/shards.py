"""Arrays that are split over several processes, as files: each process writes its own shards, and nobody waits for anybody.

An array is stored in the Zarr 3 format with a chunk for each shard, so a shard is a file (`core.formats.zarr`), whose hash is taken
while it is written. Orbax, which writes the checkpoints of one process, would need barriers over the devices in the middle of
training, and when one process fails the others wait five minutes (docs/decisions/0018). It reads this layout, as readers of ours do.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.core.formats import Entry, Shape
from argosy.core.formats.files import File, write_all
from argosy.core.formats.zarr import described_shards, shard_file

Described = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Split:
    """An array of a checkpoint, as this process sees it. each: the shape of a shard. own: the shards that this process writes, by their
    place in the grid of shards."""

    shape: Shape
    dtype: np.dtype
    each: Shape
    own: dict[tuple[int, ...], np.ndarray]


def split(array: Any, leads: bool, copies: bool = False) -> Split:
    """Copies the shards that this process writes off its devices. Of copies of a shard, one process writes the first; an array of the
    host, which all processes have, the leader. copies: every process writes each shard that its devices hold."""
    if not isinstance(array, jax.Array):
        return Split(array.shape, array.dtype, array.shape, {(0,) * array.ndim: array} if leads else {})
    each = tuple(array.sharding.shard_shape(array.shape))
    own = {}
    for shard in array.addressable_shards:
        at = tuple((part.start or 0) // size if size else 0 for part, size in zip(shard.index, each, strict=True))
        if at not in own and (copies or shard.replica_id == 0):
            # A copy: the loop donates the array to the next step.
            own[at] = np.array(shard.data)
    return Split(tuple(array.shape), np.dtype(array.dtype), each, own)


def start_copies(array: Any, copies: bool = False) -> None:
    """Starts the copies of `split` without waiting for them."""
    seen = set()
    for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
        at = tuple((part.start, part.stop) for part in shard.index)
        if at not in seen and (copies or shard.replica_id == 0):
            seen.add(at)
            shard.data.copy_to_host_async()


def files_of(item: str, arrays: Mapping[str, Split]) -> Iterator[File]:
    """The files of the shards that this process writes."""
    for name, array in arrays.items():
        for at, values in array.own.items() if 0 not in array.shape else ():
            entry = Entry(name, array.each, array.dtype, lambda values=values: values)
            file = shard_file(entry, at)
            yield file._replace(name=f"{item}/{file.name}")


def described(arrays: Mapping[str, Split]) -> list[File]:
    """The metadata of the arrays, which one process writes.

    Raises:
        Unsupported: the format has no name for a type.
    """
    return [described_shards(name, array.shape, array.each, array.dtype) for name, array in arrays.items()]


def write(folder: Path, files: Iterable[File]) -> Described:
    """Writes files and returns the size and hash of each, {name: ...}. They are on disk on return."""
    out: Described = {}
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as stream:
            for slab in file.slabs(np.ascontiguousarray):
                digest.update(slab.data)
                write_all(stream, slab)
            os.fsync(stream.fileno())
        out[file.name] = {"bytes": file.bytes, "sha256": digest.hexdigest()}
    return out


def read(folder: Path, item: str, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of a checkpoint, of either layout, onto their shardings; each process reads only what its devices hold."""
    def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        stored = opened(folder, name, item)

        def part(index: Any) -> np.ndarray:
            return np.asarray(stored[index].read().result()).astype(like.dtype, copy=False)

        assert like.sharding is not None
        return jax.make_array_from_callback(like.shape, like.sharding, part)

    return {name: array(name, like) for name, like in wanted.items()}


def needed(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The files of the shards that `read` opens in this process. wanted: {item: {name: sharding}}; arrays that `files_of` did not write
    have none."""
    found: dict[str, None] = {}
    for item, places in wanted.items():
        for name, sharding in places.items():
            if not (described := folder / item / name / "zarr.json").exists():
                continue
            stored = json.loads(described.read_text())
            shape, each = stored["shape"], stored["chunk_grid"]["configuration"]["chunk_shape"]
            for index in sharding.addressable_devices_indices_map(tuple(shape)).values():
                spans = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
                cells = [range(start // size, -(-stop // size)) for (start, stop), size in zip(spans, each, strict=True)]
                found |= {"/".join([item, name, "c", *map(str, at)]): None for at in product(*cells)}
    return list(found)


def is_packed(folder: Path, item: str) -> bool:
    """Whether the arrays of an item are in files that they share, as Orbax writes them by default."""
    return json.loads((folder / item / "_METADATA").read_text())["use_ocdbt"]


def opened(folder: Path, name: str, item: str) -> Any:
    """One array of a checkpoint in TensorStore, from which parts are read."""
    import tensorstore

    # TensorStore refuses paths with `..`.
    item_folder = (folder / item).resolve()
    packed = is_packed(folder, item)
    files = {"driver": "file", "path": f"{item_folder}/" if packed else f"{item_folder}/{name}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if packed else files
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
