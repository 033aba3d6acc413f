"""How the data of a product is rounded before it: to a format of a few bits, with scales of its own.

    per token      one scale for each row of the data, from its largest magnitude, or for each block along the summed axes
    static         one scale for all data, which calibration has found; larger magnitudes saturate

A token with NaN or an infinity becomes NaN either way.

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
    """Data as whole numbers.

    bits: of each number.
    scales: of a row, for blocks of equal length.
    """

    bits: int
    scales: int


@dataclass(frozen=True)
class Activations:
    """Rounds data.

    format: a key of `FORMATS`.
    block: how many numbers share a scale, along the summed axes; None: a whole row.
    """

    format: str
    block: int | None = None

    def quantize(self, x: Float[Array, "..."], summed: tuple[int, ...], scale: Array | None = None) -> Quantized:
        """Rounds data.

        Args:
            summed: the axes that the product sums over.
            scale: of the data; None: its own.
        """
        format = FORMATS[self.format]
        sizes = [x.shape[axis] for axis in summed]
        shared = dict(zip(summed, along(sizes, self.block or format.block), strict=True))
        block = tuple(shared.get(axis, 1) for axis in range(x.ndim))
        lead = 0
        if format.scales == "e4m3":
            # A row's second level is its own: it must not depend on other rows of a batch.
            lead = x.ndim - len(summed) if summed == tuple(range(x.ndim - len(summed), x.ndim)) else 0
        if scale is None:
            return format.quantize(x, block, lead=lead)
        finite = jnp.isfinite(x).all(summed, keepdims=True)
        return format.scaled(x, jnp.where(finite, scale.astype(jnp.float32), jnp.nan))

    def whole_numbers(self, sizes: Sequence[int], *, is_static: bool) -> WholeNumbers | None:
        """How data is rounded to whole numbers; None if it is not, or if blocks are not contiguous.

        Args:
            sizes: of the summed axes.
            is_static: whether all data has one scale, which is given.
        """
        format = FORMATS[self.format]
        if not format.is_integer or format.scales != "float32":
            return None
        if is_static:
            return WholeNumbers(format.bits, 1)
        counts = [size // each for size, each in zip(sizes, along(sizes, self.block or format.block), strict=True)]
        return WholeNumbers(format.bits, math.prod(counts)) if block_counts(sizes, counts) == counts else None

    def static_scale(self, largest: float) -> Float[np.ndarray, ""]:
        """The scale of all data from its largest magnitude, which becomes the largest element. 1 where the data was zeros, so that
        whatever comes is rounded to whole elements."""
        scale = np.float32(largest) / np.float32(FORMATS[self.format].largest)
        return np.asarray(scale if scale >= TINY else 1.0, np.float32)

    def __str__(self) -> str:
        return self.format if self.block is None else f"{self.format}/{self.block}"
