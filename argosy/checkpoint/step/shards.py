"""Arrays as files of values, whose hashes are taken while they are written; each process writes its own shards, and nobody waits for
anybody.

An array is stored in the Zarr 3 format with a chunk for each shard, so a shard is a file (`core.formats.zarr`). Orbax would need
barriers over the devices in the middle of training, and when one process fails the others wait five minutes (docs/decisions/0018);
of one process it would take longer and read everything again for the hashes (0027). It reads this layout, as readers of ours do.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from argosy.checkpoint.saving.memory import Copies
from argosy.checkpoint.saving.pace import Pace
from argosy.core.errors import Unsupported
from argosy.core.formats import Shape, TensorEntry
from argosy.core.formats.files import File, sync, write_all
from argosy.core.formats.zarr import array_files, described_shards, shard_file
from argosy.core.formats.zarr_parts import Laid, Spans, aligned, laid, read_parts
from argosy.core.process.cores import core_count
from argosy.weights import manifest

Described = dict[str, dict[str, Any]]
T = TypeVar("T")
# At most so many arrays are copied off the devices at once.
COPIES_AT_ONCE = 4
# Arrays are read in groups of this size, each put on the devices before the next: the host needs no room for a whole state.
GROUP_BYTES = 1 << 30
# Files below this are forced to disk together, after the last.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Split:
    """An array of a checkpoint, as this process sees it. each: the shape of a shard. own: the shards that this process writes, by their
    place in the grid of shards."""

    shape: Shape
    dtype: np.dtype
    each: Shape
    own: dict[tuple[int, ...], np.ndarray]


def split_all(items: Mapping[str, Mapping[str, Any]], copies: Copies, leads: bool, every: bool = False) -> dict[str, dict[str, Split]]:
    """Copies the shards that this process writes off its devices. Of several that are equal, one process writes the first; an array of
    the host, which all processes have, the leader. every: every process writes each shard that its devices hold."""
    for shard in (shard for array in _arrays_of(items) for shard in _shards_of(array, every).values()):
        shard.data.copy_to_host_async()
    return for_each(items, lambda array: _split(array, copies, leads, every))


def for_each(items: Mapping[str, Mapping[str, Any]], copy: Callable[[Any], T]) -> dict[str, dict[str, T]]:
    """Copies arrays, {item: {name: array}}, some at once: training stands still meanwhile."""
    with ThreadPoolExecutor(min(COPIES_AT_ONCE, core_count()), "copy") as pool:
        made = iter(list(pool.map(copy, _arrays_of(items))))
    return {item: {name: next(made) for name in own} for item, own in items.items()}


def _split(array: Any, copies: Copies, leads: bool, every: bool) -> Split:
    if not isinstance(array, jax.Array):
        return Split(array.shape, array.dtype, array.shape, {(0,) * array.ndim: copies.of(array)} if leads else {})
    # The loop donates the array to the next step.
    own = {at: copies.of(shard.data) for at, shard in _shards_of(array, every).items()}
    return Split(tuple(array.shape), np.dtype(array.dtype), tuple(array.sharding.shard_shape(array.shape)), own)


def sizes(items: Mapping[str, Mapping[str, Any]], every: bool = False) -> Counter[int]:
    """{bytes of a shard: how many} of those that `split_all` copies off the devices."""
    return Counter(shard.data.nbytes for array in _arrays_of(items) for shard in _shards_of(array, every).values())


def _arrays_of(items: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    return (array for own in items.values() for array in own.values())


def _shards_of(array: Any, every: bool) -> dict[tuple[int, ...], Any]:
    """The shards of an array on this process's devices that it writes, by their place in the grid of shards."""
    if not isinstance(array, jax.Array):
        return {}
    each, own = array.sharding.shard_shape(array.shape), dict[tuple[int, ...], Any]()
    for shard in array.addressable_shards:
        at = tuple((part.start or 0) // size if size else 0 for part, size in zip(shard.index, each, strict=True))
        if every or shard.replica_id == 0:
            own.setdefault(at, shard)
    return own


def whole_files(items: Mapping[str, Mapping[str, np.ndarray]]) -> list[File]:
    """The files of arrays of the host, {item: {name: array}}: one of values each, and one that describes it.

    Raises:
        Unsupported: the format has no name for a type, or an array's name is no name of a folder.
    """
    for name in (name for own in items.values() for name in own):
        if not _is_folder_name(name):
            raise Unsupported(f"an array named {name[:80]!r} cannot be a folder of a checkpoint")
    entries = {item: [TensorEntry(n, a.shape, a.dtype, lambda a=a: a) for n, a in own.items()] for item, own in items.items()}
    return [f._replace(name=f"{item}/{f.name}") for item, own in entries.items() for entry in own for f in array_files(entry)]


def _is_folder_name(name: str) -> bool:
    """Whether an array can have this name: one or more parts, none of which is empty, hidden or too long."""
    return all(part and not part.startswith((".", "_METADATA")) and len(part.encode()) < 256 for part in name.split("/"))


def files_of(item: str, arrays: Mapping[str, Split]) -> Iterator[File]:
    """The files of the shards that this process writes."""
    for name, array in arrays.items():
        for at, values in array.own.items() if 0 not in array.shape else ():
            entry = TensorEntry(name, array.each, array.dtype, lambda values=values: values)
            file = shard_file(entry, at)
            yield file._replace(name=f"{item}/{file.name}")


def described(arrays: Mapping[str, Split]) -> list[File]:
    """The metadata of the arrays, which one process writes.

    Raises:
        Unsupported: the format has no name for a type.
    """
    return [described_shards(name, array.shape, array.each, array.dtype) for name, array in arrays.items()]


def write(folder: Path, files: Iterable[File], pace: Pace | None = None) -> Described:
    """Writes files, hashing them meanwhile, and returns the size and hash of each, {name: ...}. They are on disk on return. pace: to
    be kept beside training."""
    files = list(files)
    found = {file.name: _write(folder / file.name, file, pace) for file in files}
    small = [folder / file.name for file in files if file.bytes < SMALL_BYTES]
    while small and pace is not None and pace.worked():
        sync(small.pop())
    # Most of a small file's time is waiting for the disk, which takes in one go what was written before and is waited for together.
    with ThreadPoolExecutor(manifest.THREADS, "sync") as pool:
        list(pool.map(sync, small))
    return found


def _write(path: Path, file: File, pace: Pace | None) -> dict[str, Any]:
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


def read(folder: Path, item: str, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of a checkpoint, of either layout, onto their shardings; each process reads only what its devices hold.

    What this module wrote is read into memory that on a CPU becomes the array's own; the rest goes through TensorStore.

    Raises:
        Damaged, OSError: a file cannot be read, or is not what its metadata say.
    """
    out: dict[str, jax.Array] = {}
    stored = {name: laid(folder / item / name) for name in wanted}
    group: dict[str, dict[Spans, np.ndarray]] = {}
    size = 0
    for name, like in wanted.items():
        array = stored[name]
        if array is None:
            out[name] = _by_tensorstore(folder, item, name, like)
            continue
        if size >= GROUP_BYTES:
            # Transfers read the memory of a group until they are done.
            out |= jax.block_until_ready(_arrays(stored, group, wanted))
            group, size = {}, 0
        assert like.sharding is not None
        indices = like.sharding.addressable_devices_indices_map(array.shape).values()
        every = {_spans(index, array.shape) for index in indices}
        group[name] = {spans: aligned(tuple(stop - start for start, stop in spans), array.dtype) for spans in every}
        size += sum(part.nbytes for part in group[name].values())
    out |= _arrays(stored, group, wanted)
    return {name: out[name] for name in wanted}


def read_on_host(folder: Path, item: str) -> dict[str, np.ndarray] | None:
    """The arrays of an item as numpy arrays, whose types JAX may not have (int64); None where this module did not write them.

    Raises:
        Damaged, OSError: as `read`.
    """
    names = names_of(folder, item)
    stored = {name: array for name in names if (array := laid(folder / item / name)) is not None}
    if len(stored) < len(names):
        return None
    out = {name: aligned(array.shape, array.dtype) for name, array in stored.items()}
    read_parts((array, tuple((0, n) for n in array.shape), out[name]) for name, array in stored.items())
    return out


def _arrays(
    stored: Mapping[str, Laid | None], group: Mapping[str, Mapping[Spans, np.ndarray]], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    read_parts((array, spans, part) for name, parts in group.items() if (array := stored[name]) for spans, part in parts.items())

    def put(name: str, parts: Mapping[Spans, np.ndarray]) -> jax.Array:
        like = wanted[name]
        assert like.sharding is not None
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: parts[_spans(index, like.shape)].astype(like.dtype, copy=False)
        )

    return {name: put(name, parts) for name, parts in group.items()}


def _spans(index: Any, shape: Shape) -> Spans:
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def _by_tensorstore(folder: Path, item: str, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    stored = opened(folder, name, item)

    def part(index: Any) -> np.ndarray:
        return np.asarray(stored[index].read().result()).astype(like.dtype, copy=False)

    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, part)


def needed(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The files of the shards that `read` opens in this process. wanted: {item: {name: sharding}}; arrays that this module did not
    write have none."""
    found: dict[str, None] = {}
    for item, places in wanted.items():
        for name, sharding in places.items():
            if (array := laid(folder / item / name)) is None:
                continue
            for index in sharding.addressable_devices_indices_map(array.shape).values():
                cells = array.cells(_spans(index, array.shape))
                found |= {array.file(at).relative_to(folder).as_posix(): None for at in cells}
    return list(found)


def names_of(folder: Path, item: str) -> list[str]:
    """The names of the arrays of an item."""
    tree = json.loads((folder / item / "_METADATA").read_text())["tree_metadata"]
    return [entry["key_metadata"][0]["key"] for entry in tree.values()]


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
