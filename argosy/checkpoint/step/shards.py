"""Arrays as files of values: each process writes its own shards, and nobody waits for anybody.

An array is stored in the Zarr 3 format with a chunk for each shard, so a shard is a file (`core.formats.zarr`). Orbax would need
barriers over the devices in the middle of training, and when one process fails the others wait five minutes (docs/decisions/0018);
of one process it would take longer and read everything again for the hashes (0027). It reads this layout, and what it wrote itself is
read here through TensorStore.
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

# At most so many arrays are copied off the devices at once.
COPIES_AT_ONCE = 4
# Arrays are read in groups of this size, each put on the devices before the next: the host needs no room for a whole state.
GROUP_BYTES = 1 << 30


@dataclass(frozen=True)
class ShardedArray:
    """An array of a checkpoint, as this process sees it.

    shard_shape: the shape of each shard.
    shards: those that this process writes, by their place in the grid of shards.
    """

    shape: Shape
    dtype: np.dtype
    shard_shape: Shape
    shards: dict[tuple[int, ...], np.ndarray]


# The arrays of a step: {item: {name: array}}.
Items = Mapping[str, Mapping[str, ShardedArray]]


def copy_shards(items: Mapping[str, Mapping[str, Any]], copies: HostCopies, leads: bool, replicas: bool = False) -> Items:
    """Copies the shards that this process writes off its devices. Only the first of equal shards is written, by one process. Arrays
    on the host, which all processes have, are written by the leader.

    Args:
        replicas: every process writes each shard that its devices hold.
    """
    # All copies start before the first is waited for.
    for shard in (shard for array in _arrays_of(items) for shard in _shards_of(array, replicas).values()):
        shard.data.copy_to_host_async()
    with ThreadPoolExecutor(min(COPIES_AT_ONCE, core_count()), "copy") as pool:
        done = iter(list(pool.map(lambda array: _copy(array, copies, leads, replicas), _arrays_of(items))))
    return {item: {name: next(done) for name in arrays} for item, arrays in items.items()}


def _copy(array: Any, copies: HostCopies, leads: bool, replicas: bool) -> ShardedArray:
    if not isinstance(array, jax.Array):
        return ShardedArray(array.shape, array.dtype, array.shape, {(0,) * array.ndim: copies.of(array)} if leads else {})
    # Copies, because the loop donates the array to the next step.
    shape, dtype, shards = tuple(array.shape), np.dtype(array.dtype), _shards_of(array, replicas)
    if array.is_fully_addressable:
        # One file, however many devices of this process share the array.
        whole = copies.joined(shape, dtype, [(shard.index, shard.data) for shard in shards.values()])
        return ShardedArray(shape, dtype, shape, {(0,) * array.ndim: whole})
    parts = {at: copies.of(shard.data) for at, shard in shards.items()}
    return ShardedArray(shape, dtype, tuple(array.sharding.shard_shape(shape)), parts)


def copied_sizes(items: Mapping[str, Mapping[str, Any]], replicas: bool = False) -> Counter[int]:
    """The sizes of the copies that `copy_shards` makes of arrays on devices: {bytes of a copy: number of copies}."""
    sizes = Counter[int]()
    for array in (array for array in _arrays_of(items) if isinstance(array, jax.Array)):
        whole = array.is_fully_addressable
        sizes.update([array.nbytes] if whole else [shard.data.nbytes for shard in _shards_of(array, replicas).values()])
    return sizes


def _arrays_of(items: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    return (array for arrays in items.values() for array in arrays.values())


def _shards_of(array: Any, replicas: bool) -> dict[tuple[int, ...], Any]:
    """The shards of an array on this process's devices that it writes, by their place in the grid of shards."""
    if not isinstance(array, jax.Array):
        return {}
    sizes, shards = array.sharding.shard_shape(array.shape), dict[tuple[int, ...], Any]()
    for shard in array.addressable_shards:
        at = tuple((part.start or 0) // size if size else 0 for part, size in zip(shard.index, sizes, strict=True))
        if replicas or shard.replica_id == 0:
            shards.setdefault(at, shard)
    return shards


def _is_folder_name(name: str) -> bool:
    """Whether an array can have this name: one or more parts, none of which is empty, hidden or too long."""
    return all(part and not part.startswith((".", "_METADATA")) and len(part.encode()) < 256 for part in name.split("/"))


def shard_files(items: Items) -> list[File]:
    """The files of the shards that this process writes."""
    files = []
    for item, arrays in items.items():
        for name, array in arrays.items():
            for at, values in array.shards.items() if 0 not in array.shape else ():
                shard = TensorEntry(name, array.shard_shape, array.dtype, lambda values=values: values)
                file = shard_file(shard, at, array.shape)
                files.append(file._replace(name=f"{item}/{file.name}"))
    return files


def description_files(items: Items, meta: str) -> list[File]:
    """The files that describe a step, which one process writes: the metadata of each array, those of each item, and meta.json.

    Raises:
        Unsupported: the format has no name for a type, or an array's name is no name of a folder.
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
    """Arrays of a checkpoint onto their shardings; each process reads only what its devices hold.

    What this module wrote is read into memory that on a CPU becomes the array's own.

    Raises:
        Damaged, OSError: a file cannot be read, or is not what its metadata say.
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
            # Transfers read the memory of a group until they are done.
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
    """Arrays of an item as numpy arrays, whose types JAX may not have (int64).

    Args:
        names: all by default.

    Raises:
        Damaged, OSError: as `read_arrays`.
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
    """Names, shapes and types of the arrays of an item."""
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
    """The files of the shards that `read_arrays` opens in this process.

    Args:
        folder: a step, with what describes it.
        shardings: {item: {name: sharding}}.
        files: all files of the step.
    """
    needed = set[str]()
    for item, places in shardings.items():
        for name, sharding in places.items():
            if (array := zarr_layout(folder / item / name)) is None:
                # Orbax wrote it, into files that its arrays share.
                needed.update(file for file in files if file.startswith(f"{item}/"))
                continue
            for index in sharding.addressable_devices_indices_map(array.shape).values():
                cells = array.cells(_spans(index, array.shape))
                needed.update(array.file(at).relative_to(folder).as_posix() for at in cells)
    return needed


def array_names(folder: Path, item: str) -> list[str]:
    """The names of the arrays of an item."""
    tree = json.loads((folder / item / "_METADATA").read_text())["tree_metadata"]
    return [entry["key_metadata"][0]["key"] for entry in tree.values()]


def open_array(folder: Path, name: str, item: str) -> Any:
    """An array that Orbax wrote, opened with TensorStore.

    Args:
        folder: folder of the checkpoint.
        name: name of the array.
        item: the checkpoint's item, such as weights; its arrays may be packed together or not.
    """
    import tensorstore

    # TensorStore refuses paths with `..`.
    item_folder = (folder / item).resolve()
    packed = json.loads((item_folder / "_METADATA").read_text())["use_ocdbt"]
    files = {"driver": "file", "path": f"{item_folder}/" if packed else f"{item_folder}/{name}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if packed else files
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
