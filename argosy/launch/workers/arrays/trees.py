"""What goes between processes: pytrees of arrays and plain values, taken apart and described.

A tree is its skeleton, in which slots stand for arrays, and the arrays. Skeletons are pickled: whoever can call a function of a worker
runs code there anyway. Arrays are not.
"""

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from argosy.core.errors import BadInput

PLAIN = (bool, int, float, complex, str, bytes, np.generic, np.dtype, PurePath)
# From where to where along each axis.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slot:
    """Stands for an array in a skeleton."""

    index: int


@dataclass(frozen=True)
class WorkerValue:
    """Stands for something that the worker has, in arguments."""

    number: int


@dataclass(frozen=True)
class Leaf:
    """What one process has of an array. boxes: its shards, each once. crc: of the bytes of an array that is the process's own, not
    one of all processes of its group; None of others."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    crc: int | None


def apart(tree: Any, label: str, hint: str, keep: tuple[type, ...] = ()) -> tuple[Any, list[str], list[Any]]:
    """The skeleton, and the paths and arrays of its slots. keep: other types that stay in the skeleton.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda one: isinstance(one, keep))
    paths, arrays, leaves = [], [], []
    for keys, leaf in found:
        path = f"{label}{jax.tree_util.keystr(keys)}"
        if isinstance(leaf, (*PLAIN, *keep)):
            leaves.append(leaf)
            continue
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise BadInput(f"{path} is a {type(leaf).__name__}, neither an array nor a plain value", hint=hint)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise BadInput(f"{path} is an array of {leaf.dtype}", hint="jax.random.key_data gives the numbers of random keys")
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.names:
            raise BadInput(f"{path} is an array of {leaf.dtype}, not of numbers")
        leaves.append(Slot(len(arrays)))
        paths.append(path)
        arrays.append(leaf)
    return jax.tree_util.tree_unflatten(structure, leaves), paths, arrays


def together(skeleton: Any, arrays: Sequence[Any]) -> Any:
    """A tree again."""
    return jax.tree.map(lambda leaf: arrays[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton)


def packed(arguments: Any, number_of: Callable[[Any], int], kind: type) -> bytes:
    """Arguments of a function, in bytes; those of `kind` are things that the worker has.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    hint = "functions take arrays, plain values, and what the same group has (a Ref)"
    skeleton, _, arrays = apart(arguments, "the arguments", hint, keep=(kind,))
    leaves = jax.tree.map(lambda one: WorkerValue(number_of(one)) if isinstance(one, kind) else one, skeleton)
    return pickle.dumps((leaves, [np.asarray(one) for one in arrays]), protocol=5)


def unpacked(data: bytes, value_of: Callable[[int], Any]) -> Any:
    """Arguments as `packed` got them; arrays are numpy arrays.

    value_of: returns the value of a number, for each `WorkerValue`.
    """
    skeleton, arrays = pickle.loads(data)
    return jax.tree.map(lambda one: value_of(one.number) if isinstance(one, WorkerValue) else one, together(skeleton, arrays))


# ---------------------------------------------------------------- arrays


def is_own(array: Any) -> bool:
    """Whether an array belongs to this process alone."""
    if isinstance(array, np.ndarray):
        return True
    return array.is_fully_addressable and bool(array.addressable_shards)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """A shard's place, as jax gives it."""
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape))


def shards_of(array: Any) -> dict[Box, Any]:
    """What this process has of an array, each shard once."""
    if isinstance(array, np.ndarray):
        return {whole(array.shape): array}
    return {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def described(tree: Any, several: bool) -> tuple[bytes, list[Leaf]]:
    """The skeleton in bytes, and what this process has of each array. several: whether the group has more processes.

    Raises:
        BadInput: there is something else than arrays and plain values.
    """
    hint = "return arrays and plain values to bring or move them; anything else stays in the worker, where functions get it"
    skeleton, paths, arrays = apart(tree, "the result", hint)
    leaves = []
    for path, array in zip(paths, arrays):
        own = is_own(array)
        crc = zlib.crc32(as_bytes(np.asarray(array))) if own and several else None
        leaves.append(Leaf(path, tuple(array.shape), str(array.dtype), tuple(shards_of(array)) if array.size else (), crc))
    return pickle.dumps(skeleton, protocol=5), leaves


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in rows; those of one that is not contiguous are copied."""
    return bytes_of(np.ascontiguousarray(array))


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, as they lie there."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def overlap(box: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other))
    return None if any(start >= stop for start, stop in found) else found


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices of an array of the outer box that give the inner one."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer))


def volume(box: Box) -> int:
    out = 1
    for start, stop in box:
        out *= stop - start
    return out
