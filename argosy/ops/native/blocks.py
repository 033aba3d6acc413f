"""Weights whose numbers a file has in blocks, packed for a CPU's products without becoming floats.

    w = scale * (code - zero) - minimum        a scale, and perhaps a minimum, for each 16 or 32 codes along the summed axis

Codes of up to four bits are two in a byte, all others have one each; scales and minima are float32, because those of some types
(Q4_K) are products of two numbers. A product has the bits of that with the float32 weight (`blocks.cc`), and reads a sixth to a third
of its bytes. This module knows no files: what has the blocks decodes some columns at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from argosy.core.formats.quants import IntegerBlocks
from argosy.ops.native.products import PANEL, Panels

# Codes that are decoded at a time: temporaries of a few megabytes.
AT_ONCE = 1 << 20


def packed_blocks(
    read: Callable[[slice], IntegerBlocks], limits: tuple[int, int], shape: tuple[int, ...], inner: int, first: bool, *, like: Any =
    None
) -> Panels:
    """A weight in panels, from its blocks.

    Args:
        read: the codes of these columns.
        limits: the smallest and the largest code.
        shape, inner, first: as in `Panels`.
        like: an array; the panels are tied to a device only if it is.
    """
    summed = int(np.prod(shape[:inner] if first else shape[len(shape) - inner :]))
    columns = int(np.prod(shape)) // summed
    count, step = -(-columns // PANEL), max(1, AT_ONCE // (summed * PANEL))
    in_pairs, zero = limits[1] - limits[0] < 16, -limits[0]
    values = np.zeros((count, summed, PANEL // 2 if in_pairs else PANEL), np.uint8)
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None
    for at in range(0, count, step):
        panels = slice(at, min(at + step, count))
        found = read(slice(at * PANEL, min(panels.stop * PANEL, columns)))
        q = in_panels(found.q.view(np.uint8) + np.uint8(zero))
        values[panels] = q[..., : PANEL // 2] | q[..., PANEL // 2 :] << 4 if in_pairs else q ^ 128
        if scale is None:
            scale = np.zeros((count, found.scale.shape[1], PANEL), np.float32)
            minimum = None if found.minimum is None else np.zeros_like(scale)
        scale[panels] = in_panels(found.scale)
        if minimum is not None and found.minimum is not None:
            minimum[panels] = in_panels(found.minimum)
    place = like.sharding if isinstance(like, jax.Array) and like.committed else None
    arrays = (None if a is None else jax.device_put(a, place, may_alias=True) for a in (values, scale, minimum))
    values_, scale_, minimum_ = arrays
    return Panels(values_, tuple(shape), inner, first, np.dtype(np.float32), scale_, minimum_, zero)


def packed_bytes(columns: int, one: IntegerBlocks, limits: tuple[int, int]) -> int:
    """The bytes of a packed weight.

    Args:
        one: the codes of one column.
    """
    codes = one.q.shape[1] // 2 if limits[1] - limits[0] < 16 else one.q.shape[1]
    scales = one.scale.shape[1] * (1 if one.minimum is None else 2)
    return -(-columns // PANEL) * PANEL * (codes + 4 * scales)


def in_panels(a: np.ndarray) -> np.ndarray:
    """[columns n] as [panels n PANEL], filled up with zeros."""
    columns, n = a.shape
    if rest := -columns % PANEL:
        a = np.concatenate([a, np.zeros((rest, n), a.dtype)])
    return a.reshape(-1, PANEL, n).transpose(0, 2, 1)
