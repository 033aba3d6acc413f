"""Rounds activations before a matrix product to a format of few bits, with scales.

    per token      one scale for each row of activations, or for each block along the summed axes, from the largest magnitude
    static         one scale for all activations, from calibration; larger magnitudes saturate

A token with NaN or an infinity becomes NaN in both cases.

`models.parts.einsum` calls this object, which a `Quantized` weight carries, and knows no formats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.adapt.formats.blocks import along
from argosy.adapt.formats.format import TINY
from argosy.adapt.formats.table import FORMATS
from argosy.ops.native.products import block_counts
from argosy.ops.quantized import Quantized


class WholeNumbers(NamedTuple):
    """The integer form of rounded activations.

    bits: the bits of each integer.
    scales: the number of scales per row, for blocks of equal length.
    """

    bits: int
    scales: int


@dataclass(frozen=True)
class Activations:
    """The rounding of activations.

    format: the number format, a key of `FORMATS`.
    block: the number of activations along the summed axes that share a scale. None stands for the format's own block, or a whole row.
    """

    format: str
    block: int | None = None

    def quantize(self, x: Float[Array, "..."], summed: tuple[int, ...], scale: Array | None = None) -> Quantized:
        """Rounds activations.

        Args:
            summed: the axes that the product sums over.
            scale: the static scale. None computes dynamic scales.
        """
        format = FORMATS[self.format]
        sizes = [x.shape[axis] for axis in summed]
        shared = dict(zip(summed, along(sizes, self.block or format.block), strict=True))
        block = tuple(shared.get(axis, 1) for axis in range(x.ndim))
        lead = 0
        if format.scales == "e4m3":
            # Each row has its own second-level scale, so that it does not depend on other rows of a batch.
            lead = x.ndim - len(summed) if summed == tuple(range(x.ndim - len(summed), x.ndim)) else 0
        if scale is None:
            return format.quantize(x, block, lead=lead)
        finite = jnp.isfinite(x).all(summed, keepdims=True)
        return format.scaled(x, jnp.where(finite, scale.astype(jnp.float32), jnp.nan))

    def whole_numbers(self, sizes: Sequence[int], *, is_static: bool) -> WholeNumbers | None:
        """Returns the integer form of rounded activations; None if the format is not an integer format, or if blocks are not
        contiguous.

        Args:
            sizes: the sizes of the summed axes.
            is_static: whether all activations share a static scale.
        """
        format = FORMATS[self.format]
        if not format.is_integer or format.scales != "float32":
            return None
        if is_static:
            return WholeNumbers(format.bits, 1)
        counts = [size // each for size, each in zip(sizes, along(sizes, self.block or format.block), strict=True)]
        return WholeNumbers(format.bits, math.prod(counts)) if block_counts(sizes, counts) == counts else None

    def static_scale(self, largest: float) -> Float[np.ndarray, ""]:
        """Returns the scale that maps the largest magnitude in the calibration data to the largest value of the number format. If all
        calibration data was zero, returns 1, so that activations are rounded to integers."""
        scale = np.float32(largest) / np.float32(FORMATS[self.format].largest)
        return np.asarray(scale if scale >= TINY else 1.0, np.float32)

    def __str__(self) -> str:
        return self.format if self.block is None else f"{self.format}/{self.block}"
