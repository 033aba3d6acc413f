"""How the data of a product is rounded before it: to a format of a few bits, with scales of its own.

    per token      one scale for each row of the data, from its largest magnitude, or for each block along the summed axes
    static         one scale for all data, which calibration has found; larger magnitudes saturate

`models.parts.einsum` calls this object, which a `Quantized` weight carries, and knows no formats.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.adapt.formats.blocks import along
from argosy.adapt.formats.format import Limits
from argosy.adapt.formats.table import FORMATS
from argosy.ops.quantized import Quantized


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
        block = x.shape
        high = jnp.broadcast_to(scale.astype(jnp.float32) * format.largest, (1,) * x.ndim)
        return format.rounded(x, block, Limits(high))

    def __str__(self) -> str:
        return self.format if self.block is None else f"{self.format}/{self.block}"
