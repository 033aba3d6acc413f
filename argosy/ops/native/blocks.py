"""Packs weights of few bits for products on a CPU, without converting them to floats.

    w = scale * number - minimum        a scale, and perhaps a minimum, for each block of codes along the summed axis

The weights come from the blocks of a GGUF file, or are `Quantized` arrays of any format: integers, levels such as NF4's, and floats of
eight, six and four bits. For GGUF, products are bit-identical to those with the float32 weight. Scales and minima are float32, because
those of some types (Q4_K) are products of two numbers. A product reads a sixth to a third of the bytes of float32. This module does not
read files: the caller decodes some columns at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from argosy.core.formats.quants import IntegerBlocks
from argosy.ops.native.codes import PANEL, CodeFormat, block_groups, group_bytes, panel_layout
from argosy.ops.native.products import Panels, block_counts
from argosy.ops.quantized import Quantized, unpack_codes

# The number of codes that are decoded at a time, which takes a few megabytes.
AT_ONCE = 1 << 20


def packed_blocks(
    read: Callable[[slice], IntegerBlocks], limits: tuple[int, int], shape: tuple[int, ...], inner: int, first: bool, *, like: Any =
    None
) -> Panels:
    """Packs a weight from the blocks of a file.

    Args:
        read: a function that decodes the codes of a slice of columns.
        limits: the smallest and the largest code.
        shape, inner, first: as in `Panels`.
        like: an array. The panels are committed to its device if the array is. None: they are not committed.
    """
    code = _code_of(limits)

    def codes(columns: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        integers = read(columns)
        return integers.q.view(np.uint8) + np.uint8(code.zero), integers.scale, integers.minimum

    return _packed(codes, code, shape, inner, first, like)


def packed_bytes(columns: int, column: IntegerBlocks, limits: tuple[int, int]) -> int:
    """Computes the size of a packed weight, in bytes.

    Args:
        columns: the number of columns.
        column: the codes of one column.
        limits: the smallest and the largest code.
    """
    bits, blocks = _code_of(limits).bits, column.scale.shape[1]
    codes = blocks * block_groups(column.q.shape[1] // blocks, bits) * group_bytes(bits)
    return -(-columns // PANEL) * (codes + 4 * PANEL * blocks * (1 if column.minimum is None else 2))


def _code_of(limits: tuple[int, int]) -> CodeFormat:
    return CodeFormat(4 if limits[1] - limits[0] < 16 else 8, -limits[0])


def packed_quantized(w: Quantized, inner: int, first: bool) -> Panels | None:
    """Packs a quantized weight, on the same device. None: there is no kernel for its codes.

    Args:
        w: the weight, in the memory of one CPU device.
        inner, first: as in `Panels`.
    """
    if (coded := _codes_of(w)) is None:
        return None
    codes, code = coded
    scale = np.asarray(w.scales)
    minimum = None if w.minimum is None else np.asarray(w.minimum, np.float32)
    summed = slice(None, inner) if first else slice(len(w.shape) - inner, None)
    along = [max(a.shape[i] for a in (scale, minimum) if a is not None) for i in range(scale.ndim)]
    counts = list(w.shape)
    counts[summed] = block_counts(w.shape[summed], along[summed])
    blocks = math.prod(counts[summed])

    def by_column(a: np.ndarray, size: int) -> np.ndarray:
        """Rearranges an array with the axes of the weight to [columns size]."""
        return a.reshape(size, -1).T if first else a.reshape(-1, size)

    def spread(a: np.ndarray) -> np.ndarray:
        for axis, count in enumerate(counts):
            a = a if a.shape[axis] == count else np.repeat(a, count // a.shape[axis], axis)
        return by_column(a, blocks)

    flat, scale = by_column(codes, math.prod(w.shape[summed])), spread(scale)
    minimum = None if minimum is None else spread(minimum)

    def read(columns: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        return flat[columns], scale[columns], None if minimum is None else minimum[columns]

    return _packed(read, code, w.shape, inner, first, w.values, w.values.shape)


def packed_experts(w: Quantized, inner: int, first: bool) -> Panels | None:
    """Packs the quantized weights of experts. The first axis is that of experts. None: there is no kernel for their codes.

    Args:
        w, inner, first: as in `packed_quantized`. `inner` and `first` are about the axes of one expert's weight.
    """
    names = [name for name in ("values", "scale", "minimum", "outer") if getattr(w, name) is not None]
    arrays, experts = {name: np.asarray(getattr(w, name)) for name in names}, list[Panels]()
    for e in range(w.shape[0]):
        fields: Any = {name: jnp.asarray(a[e if len(a) > 1 else 0]) for name, a in arrays.items()}
        if (packed := packed_quantized(replace(w, **fields, x_scale=None, activations=None), inner, first)) is None:
            return None
        experts.append(packed)
    place = w.values.sharding if isinstance(w.values, jax.Array) and w.values.committed else None

    def whole(name: str) -> Any:
        parts = [np.asarray(a) for expert in experts if (a := getattr(expert, name)) is not None]
        return jax.device_put(np.concatenate(parts), place) if parts else None

    panels = {name: whole(name) for name in ("values", "scale", "minimum")}
    return replace(experts[0], **panels, shape=w.values.shape, unpacked=w.shape, experts=w.shape[0])


def _codes_of(w: Quantized) -> tuple[np.ndarray, CodeFormat] | None:
    """Returns the codes of a quantized weight, one in a byte, and their format. None: there is no kernel for them."""
    host = np.asarray(unpack_codes(w.values, w.packed, w.bits) if w.packed else w.values)
    if w.levels is not None:
        levels = np.asarray(w.levels, np.float32)
        if len(levels) <= 16:
            return host, CodeFormat(4, 0, "levels", (*w.levels, *[0.0] * (16 - len(levels))))
        # Every 6-bit float is also an 8-bit float.
        wide = levels.astype(ml_dtypes.float8_e4m3fn)
        return (wide.view(np.uint8)[host], CodeFormat(8, 0, "e4m3")) if (wide.astype(np.float32) == levels).all() else None
    if host.dtype == np.int8:
        return host.view(np.uint8) ^ np.uint8(128), CodeFormat(8, 128 + w.zero)
    if host.dtype == np.uint8:
        # Codes of few bits may also be stored one in a byte.
        bits = w.bits if w.packed else {8: 4, 2: 2}.get(w.zero, 8)
        return host, CodeFormat(bits, w.zero)
    for name, kind in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        if host.dtype == kind:
            return host.view(np.uint8), CodeFormat(8, 0, name)  # type: ignore[arg-type]
    return None


def _packed(
    read: Callable[[slice], tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    code: CodeFormat,
    sizes: Sequence[int],
    inner: int,
    first: bool,
    like: Any,
    shape: tuple[int, ...] | None = None,
) -> Panels:
    """Packs a weight.

    Args:
        read: a function that returns codes [columns summed], scales and minima [columns blocks] of a slice of columns.
    """
    summed = math.prod(sizes[:inner] if first else sizes[len(sizes) - inner :])
    columns = math.prod(sizes) // summed
    count, step = -(-columns // PANEL), max(1, AT_ONCE // (summed * PANEL))
    arrays: list[np.ndarray | None] = []
    for at in range(0, count, step):
        panels = slice(at, min(at + step, count))
        codes, scale, minimum = read(slice(at * PANEL, min(panels.stop * PANEL, columns)))
        parts = panel_layout(_whole_panels(codes), scale.shape[1], code.bits), _in_panels(scale), _in_panels(minimum)
        if not arrays:
            arrays = [None if a is None else np.zeros((count, *a.shape[1:]), a.dtype) for a in parts]
        for whole, part in zip(arrays, parts, strict=True):
            if whole is not None:
                whole[panels] = part
    place = like.sharding if isinstance(like, jax.Array) and like.committed else None
    values, scales, minima = (None if a is None else jax.device_put(a, place, may_alias=True) for a in arrays)
    sizes = tuple(sizes)
    return Panels(values, shape or sizes, inner, first, np.dtype(np.float32), scales, minima, code, sizes if shape else None)


def _whole_panels(a: np.ndarray) -> np.ndarray:
    """Pads an array [columns n] with zeros to whole panels."""
    rest = -len(a) % PANEL
    return np.concatenate([a, np.zeros((rest, a.shape[1]), a.dtype)]) if rest else a


def _in_panels(a: np.ndarray | None) -> np.ndarray | None:
    """Rearranges an array [columns n] to [panels n PANEL]."""
    return None if a is None else _whole_panels(a).reshape(-1, PANEL, a.shape[1]).transpose(0, 2, 1)
