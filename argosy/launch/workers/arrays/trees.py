"""Splits pytrees of arrays and plain values into parts that are sent between processes.

A tree is split into its skeleton, in which slots stand for arrays, and the arrays. Skeletons are pickled: a caller of a worker's
functions can run code there anyway. Arrays are not pickled.
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
    """The place of an array in a skeleton."""

    index: int


@dataclass(frozen=True)
class WorkerValue:
    """The place of a worker's own value in arguments."""

    number: int


@dataclass(frozen=True)
class Leaf:
    """One process's shards of an array.

    path: path of the array in the tree.
    shape: shape of the whole array.
    dtype: its type.
    boxes: the slices of its shards, each once.
    crc: checksum of a process-local array; None for an array that all processes of the group share.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    crc: int | None


def apart(tree: Any, label: str, hint: str, keep: tuple[type, ...] = ()) -> tuple[Any, list[str], list[Any]]:
    """Splits a tree. Returns the skeleton, and the paths and arrays of its slots.

    Args:
        keep: further types that stay in the skeleton.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, keep))
    paths, arrays, leaves = [], [], []
    for keys, leaf in pairs:
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
    """Puts a tree together again."""
    return jax.tree.map(lambda leaf: arrays[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton)


def pack_arguments(arguments: Any, number_of: Callable[[Any], int], kind: type) -> bytes:
    """The arguments of a function as bytes. Leaves of the type `kind` refer to values of the worker.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    hint = "functions take arrays, plain values, and what the same group has (a Ref)"
    skeleton, _, arrays = apart(arguments, "the arguments", hint, keep=(kind,))
    leaves = jax.tree.map(lambda leaf: WorkerValue(number_of(leaf)) if isinstance(leaf, kind) else leaf, skeleton)
    return pickle.dumps((leaves, [np.asarray(array) for array in arrays]), protocol=5)


def unpack_arguments(data: bytes, value_of: Callable[[int], Any]) -> Any:
    """The inverse of `pack_arguments`; arrays become numpy arrays.

    Args:
        value_of: returns the worker's value of a number, for each `WorkerValue`.
    """
    skeleton, arrays = pickle.loads(data)
    return jax.tree.map(lambda leaf: value_of(leaf.number) if isinstance(leaf, WorkerValue) else leaf, together(skeleton, arrays))


# ---------------------------------------------------------------- arrays


def is_own(array: Any) -> bool:
    """Whether an array is local to this process."""
    if isinstance(array, np.ndarray):
        return True
    return array.is_fully_addressable and bool(array.addressable_shards)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """The slices of a shard, from jax's index."""
    return tuple(axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape))


def shards_of(array: Any) -> dict[Box, Any]:
    """This process's shards of an array, each once, by their slices."""
    if isinstance(array, np.ndarray):
        return {whole(array.shape): array}
    return {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def describe_tree(tree: Any, several: bool) -> tuple[bytes, list[Leaf]]:
    """The skeleton as bytes, and this process's shards of each array.

    Args:
        several: whether the group has several processes.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    hint = "return arrays and plain values to bring or move them; anything else stays in the worker, where functions get it"
    skeleton, paths, arrays = apart(tree, "the result", hint)
    leaves = []
    for path, array in zip(paths, arrays):
        is_local = is_own(array)
        crc = zlib.crc32(as_bytes(np.asarray(array))) if is_local and several else None
        leaves.append(Leaf(path, tuple(array.shape), str(array.dtype), tuple(shards_of(array)) if array.size else (), crc))
    return pickle.dumps(skeleton, protocol=5), leaves


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in row-major order; an array that is not contiguous is copied."""
    return bytes_of(np.ascontiguousarray(array))


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def overlap(box: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    intersection = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other))
    return None if any(start >= stop for start, stop in intersection) else intersection


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices of the inner box relative to the outer one."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer))


def volume(box: Box) -> int:
    out = 1
    for start, stop in box:
        out *= stop - start
    return out
