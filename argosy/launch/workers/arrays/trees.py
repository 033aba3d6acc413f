"""Splits pytrees of arrays and plain values, so that they can be sent between processes.

A pytree is split into its arrays and its skeleton, in which slots stand for the arrays. Skeletons are pickled, which is safe enough
because a controller can run code in its workers anyway. Arrays are not pickled.
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
    """The placeholder of an array in a skeleton.

    index: the index of the array.
    """

    index: int


@dataclass(frozen=True)
class WorkerValue:
    """The placeholder, in the arguments of a function, of a value that the worker holds.

    number: the number of the value.
    """

    number: int


@dataclass(frozen=True)
class Leaf:
    """The shards of an array that one process holds.

    path: the path of the array in the pytree.
    shape: the global shape of the array.
    dtype: the type of the array.
    boxes: the slices of the shards, each once.
    crc: the checksum of a process-local array; None for an array that is sharded over all processes of the group.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    crc: int | None


def apart(tree: Any, label: str, hint: str, keep: tuple[type, ...] = ()) -> tuple[Any, list[str], list[Any]]:
    """Splits a pytree. Returns the skeleton, the paths of the arrays, and the arrays.

    Args:
        label: the first word of paths, such as "the result".
        hint: the hint of the error.
        keep: further types of leaves that stay in the skeleton.

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
    """Puts a pytree together from its skeleton and its arrays."""
    return jax.tree.map(lambda leaf: arrays[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton)


def pack_arguments(arguments: Any, number_of: Callable[[Any], int], kind: type) -> bytes:
    """Pickles the arguments of a function.

    Args:
        arguments: a pytree of arrays, plain values and references.
        number_of: (reference) -> the number of the value that the worker holds.
        kind: the type of references.

    Raises:
        BadInput: a leaf is neither an array nor a plain value.
    """
    hint = "functions take arrays, plain values, and what the same group has (a Ref)"
    skeleton, _, arrays = apart(arguments, "the arguments", hint, keep=(kind,))
    leaves = jax.tree.map(lambda leaf: WorkerValue(number_of(leaf)) if isinstance(leaf, kind) else leaf, skeleton)
    return pickle.dumps((leaves, [np.asarray(array) for array in arrays]), protocol=5)


def unpack_arguments(data: bytes, value_of: Callable[[int], Any]) -> Any:
    """The inverse of `pack_arguments`. Arrays become numpy arrays.

    Args:
        value_of: (number) -> the value that the worker holds, for each reference.
    """
    skeleton, arrays = pickle.loads(data)
    return jax.tree.map(lambda leaf: value_of(leaf.number) if isinstance(leaf, WorkerValue) else leaf, together(skeleton, arrays))


# ---------------------------------------------------------------- arrays


def is_own(array: Any) -> bool:
    """Whether an array is local to this process: a numpy array, or a jax array only on devices of this process."""
    if isinstance(array, np.ndarray):
        return True
    return array.is_fully_addressable and bool(array.addressable_shards)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """Converts jax's index of a shard to the slices (start, stop) of its axes."""
    return tuple(axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape))


def shards_of(array: Any) -> dict[Box, Any]:
    """Returns the shards of an array that this process holds, by their slices. Replicas of a shard are listed once."""
    if isinstance(array, np.ndarray):
        return {whole(array.shape): array}
    return {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def describe_tree(tree: Any, several: bool) -> tuple[bytes, list[Leaf]]:
    """Describes a pytree for a transfer. Returns the pickled skeleton, and the shards of each array that this process holds.

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
    """Returns the bytes of an array in row-major order. An array that is not contiguous is copied."""
    return bytes_of(np.ascontiguousarray(array))


def bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of a contiguous array, without a copy."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def overlap(box: Box, other: Box) -> Box | None:
    """Returns the intersection of two boxes; None if it is empty."""
    intersection = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other))
    return None if any(start >= stop for start, stop in intersection) else intersection


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the slices of `box` relative to the origin of `outer`, which contains it."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer))


def volume(box: Box) -> int:
    out = 1
    for start, stop in box:
        out *= stop - start
    return out
