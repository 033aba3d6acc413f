"""Writes and reads the arrays of a checkpoint. Each process writes its own shards and waits for no other process.

An array is stored in the Zarr 3 format with a chunk for each shard, so each shard is a file (`core.formats.zarr`). Orbax would need
barriers over the devices in the middle of training, and if one process fails, the others would wait five minutes (docs/decisions/0018).
With a single process, Orbax takes longer and needs all files to be read again for the hashes (0027). Orbax reads this layout, and this
module reads the layout of Orbax through TensorStore.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.checkpoint.saving.memory import HostCopies
from argosy.checkpoint.step.layout import META, catalog
from argosy.core.errors import Unsupported
from argosy.core.formats import Shape, TensorEntry
from argosy.core.formats.files import File, of_text
from argosy.core.formats.zarr import described_shards, shard_file
from argosy.core.formats.zarr_parts import Spans, StoredArray, aligned_memory, read_parts, zarr_layout
from argosy.core.process.cores import core_count

# The number of arrays that are copied off the devices at once.
COPIES_AT_ONCE = 4
# Arrays are read in groups of this many bytes. Each group is put on the devices before the next is read, so that the host does not need
# memory for a whole state.
GROUP_BYTES = 1 << 30


@dataclass(frozen=True)
class ShardedArray:
    """An array of a checkpoint, with the shards that this process writes.

    shape: the shape of the whole array.
    shard_shape: the shape of each shard.
    shards: the values of the shards that this process writes, by position in the grid of shards.
    """

    shape: Shape
    dtype: np.dtype
    shard_shape: Shape
    shards: dict[tuple[int, ...], np.ndarray]


# The arrays of a step: {item: {name: array}}.
Items = Mapping[str, Mapping[str, ShardedArray]]


def copy_shards(items: Mapping[str, Mapping[str, Any]], copies: HostCopies, leads: bool, replicas: bool = False) -> Items:
    """Copies the shards that this process writes from its devices to the host. Only one of several equal shards is written, by one
    process. The leader writes arrays of the host, which all processes have.

    Args:
        items: the arrays of the step, {item: {name: array}}.
        copies: the host memory of this save.
        leads: whether this process writes arrays of the host.
        replicas: whether every process writes each shard that its devices hold, including replicas.
    """
    # All copies start before the first one is waited for.
    for shard in (shard for array in _arrays_of(items) for shard in _shards_of(array, replicas).values()):
        shard.data.copy_to_host_async()
    with ThreadPoolExecutor(min(COPIES_AT_ONCE, core_count()), "copy") as pool:
        done = iter(list(pool.map(lambda array: _copy(array, copies, leads, replicas), _arrays_of(items))))
    return {item: {name: next(done) for name in arrays} for item, arrays in items.items()}


def _copy(array: Any, copies: HostCopies, leads: bool, replicas: bool) -> ShardedArray:
    if not isinstance(array, jax.Array):
        return ShardedArray(array.shape, array.dtype, array.shape, {(0,) * array.ndim: copies.of(array)} if leads else {})
    # The arrays are copied, because the loop donates them to the next step.
    shape, dtype, shards = tuple(array.shape), np.dtype(array.dtype), _shards_of(array, replicas)
    if array.is_fully_addressable:
        # The array becomes one file, even if several devices of this process share it.
        whole = copies.joined(shape, dtype, [(shard.index, shard.data) for shard in shards.values()])
        return ShardedArray(shape, dtype, shape, {(0,) * array.ndim: whole})
    parts = {at: copies.of(shard.data) for at, shard in shards.items()}
    return ShardedArray(shape, dtype, tuple(array.sharding.shard_shape(shape)), parts)


def copied_sizes(items: Mapping[str, Mapping[str, Any]], replicas: bool = False) -> Counter[int]:
    """Returns the sizes of the copies that `copy_shards` makes of arrays on devices: {bytes of a copy: number of copies}."""
    sizes = Counter[int]()
    for array in (array for array in _arrays_of(items) if isinstance(array, jax.Array)):
        whole = array.is_fully_addressable
        sizes.update([array.nbytes] if whole else [shard.data.nbytes for shard in _shards_of(array, replicas).values()])
    return sizes


def _arrays_of(items: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    return (array for arrays in items.values() for array in arrays.values())


def _shards_of(array: Any, replicas: bool) -> dict[tuple[int, ...], Any]:
    """Returns the shards of an array that this process writes, by position in the grid of shards."""
    if not isinstance(array, jax.Array):
        return {}
    sizes, shards = array.sharding.shard_shape(array.shape), dict[tuple[int, ...], Any]()
    for shard in array.addressable_shards:
        at = tuple((part.start or 0) // size if size else 0 for part, size in zip(shard.index, sizes, strict=True))
        if replicas or shard.replica_id == 0:
            shards.setdefault(at, shard)
    return shards


def _is_folder_name(name: str) -> bool:
    """Whether an array can have this name, whose parts (separated by /) must not be empty, hidden or too long."""
    return all(part and not part.startswith((".", "_METADATA")) and len(part.encode()) < 256 for part in name.split("/"))


def shard_files(items: Items) -> list[File]:
    """Returns the files of the shards that this process writes."""
    files = []
    for item, arrays in items.items():
        for name, array in arrays.items():
            for at, values in array.shards.items() if 0 not in array.shape else ():
                shard = TensorEntry(name, array.shard_shape, array.dtype, lambda values=values: values)
                file = shard_file(shard, at, array.shape)
                files.append(file._replace(name=f"{item}/{file.name}"))
    return files


def description_files(items: Items, meta: str) -> list[File]:
    """Returns the files that describe a step: the metadata of each array, the metadata of each item, and meta.json. One process writes
    them.

    Raises:
        Unsupported: the format has no name for a type, or the name of an array cannot be that of a folder.
    """
    files = []
    for item, arrays in items.items():
        for name, array in arrays.items():
            if not _is_folder_name(name):
                raise Unsupported(f"an array named {name[:80]!r} cannot be a folder of a checkpoint")
            file = described_shards(name, array.shape, array.shard_shape, array.dtype)
            files.append(file._replace(name=f"{item}/{file.name}"))
    return [*files, *catalog(items), of_text(META, meta)]


def read_arrays(folder: Path, item: str, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint onto their shardings. Each process reads only the shards that its devices hold.

    On a CPU, arrays that this module wrote are not copied: they keep the memory that they are read into.

    Args:
        targets: the shape, type and sharding of each array to read, by name.

    Raises:
        Damaged, OSError: a file cannot be read, or contradicts its metadata.
    """
    out: dict[str, jax.Array] = {}
    stored = {name: zarr_layout(folder / item / name) for name in targets}
    group: dict[str, dict[Spans, np.ndarray]] = {}
    size = 0
    for name, like in targets.items():
        array = stored[name]
        if array is None:
            out[name] = _by_tensorstore(folder, item, name, like)
            continue
        if size >= GROUP_BYTES:
            # Transfers to devices read the memory of a group until they are done.
            out |= jax.block_until_ready(_arrays(stored, group, targets))
            group, size = {}, 0
        assert like.sharding is not None
        indices = like.sharding.addressable_devices_indices_map(array.shape).values()
        every = {_spans(index, array.shape) for index in indices}
        group[name] = {spans: aligned_memory(tuple(stop - start for start, stop in spans), array.dtype) for spans in every}
        size += sum(part.nbytes for part in group[name].values())
    out |= _arrays(stored, group, targets)
    return {name: out[name] for name in targets}


def read_on_host(folder: Path, item: str, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads arrays of an item as numpy arrays, whose types JAX may not have (int64).

    Args:
        names: the names of the arrays to read. The default is all.

    Raises:
        Damaged, OSError: the errors of `read_arrays`.
    """
    out, parts = dict[str, np.ndarray](), []
    for name in array_names(folder, item) if names is None else names:
        if (array := zarr_layout(folder / item / name)) is None:
            out[name] = np.asarray(open_array(folder, name, item).read().result())
            continue
        out[name] = aligned_memory(array.shape, array.dtype)
        parts.append((array, tuple((0, n) for n in array.shape), out[name]))
    read_parts(parts)
    return out


def array_shapes(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the arrays of an item by name."""
    out = {}
    for name in array_names(folder, item):
        if (array := zarr_layout(folder / item / name)) is not None:
            out[name] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        else:
            stored = open_array(folder, name, item)
            out[name] = jax.ShapeDtypeStruct(tuple(stored.shape), stored.dtype.numpy_dtype)
    return out


def _arrays(
    stored: Mapping[str, StoredArray | None],
    group: Mapping[str, Mapping[Spans, np.ndarray]],
    targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    read_parts((array, spans, part) for name, parts in group.items() if (array := stored[name]) for spans, part in parts.items())

    def put(name: str, parts: Mapping[Spans, np.ndarray]) -> jax.Array:
        like = targets[name]
        assert like.sharding is not None
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: parts[_spans(index, like.shape)].astype(like.dtype, copy=False)
        )

    return {name: put(name, parts) for name, parts in group.items()}


def _spans(index: Any, shape: Shape) -> Spans:
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def _by_tensorstore(folder: Path, item: str, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    stored = open_array(folder, name, item)

    def part(index: Any) -> np.ndarray:
        return np.asarray(stored[index].read().result()).astype(like.dtype, copy=False)

    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, part)


def needed_files(folder: Path, shardings: Mapping[str, Mapping[str, Any]], files: Iterable[str]) -> set[str]:
    """Returns the files that `read_arrays` opens in this process.

    Args:
        folder: the folder of the step, with the files that describe it.
        shardings: the sharding of each array, {item: {name: sharding}}.
        files: the names of all files of the step.
    """
    needed = set[str]()
    for item, places in shardings.items():
        for name, sharding in places.items():
            if (array := zarr_layout(folder / item / name)) is None:
                # Orbax wrote the array, into files that arrays share.
                needed.update(file for file in files if file.startswith(f"{item}/"))
                continue
            for index in sharding.addressable_devices_indices_map(array.shape).values():
                cells = array.cells(_spans(index, array.shape))
                needed.update(array.file(at).relative_to(folder).as_posix() for at in cells)
    return needed


def array_names(folder: Path, item: str) -> list[str]:
    """Returns the names of the arrays of an item."""
    tree = json.loads((folder / item / "_METADATA").read_text())["tree_metadata"]
    return [entry["key_metadata"][0]["key"] for entry in tree.values()]


def open_array(folder: Path, name: str, item: str) -> Any:
    """Opens an array that Orbax wrote, with TensorStore. It may be packed into files with other arrays (OCDBT).

    Args:
        folder: the folder of the checkpoint.
        name: the name of the array.
        item: the item of the checkpoint, such as weights.
    """
    import tensorstore

    # TensorStore refuses paths with `..`.
    item_folder = (folder / item).resolve()
    packed = json.loads((item_folder / "_METADATA").read_text())["use_ocdbt"]
    files = {"driver": "file", "path": f"{item_folder}/" if packed else f"{item_folder}/{name}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if packed else files
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
