"""A quantized array: values in few bits, and the numbers that turn them back into floats.

    w = (values - zero) * scale

`scale` and `zero` have as many axes as the values. Along each axis they have the full size (one scale per index), 1 (shared) or a
divisor of the size (one scale per block). So this one type covers scales per output channel, per input channel, per row of an
embedding and per block, in any number format. `x_scale` says how activations are rounded before the product (W8A8).
`models.parts.einsum.contract` multiplies such an array with data.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """values: integers or small floats. scale, zero: float32, as described above. x_scale: the calibrated number by which
    activations are divided before they are rounded to int8."""

    values: Array
    scale: Array
    zero: Array | None = None
    x_scale: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dequantized(self, dtype: Any = jnp.float32) -> Array:
        """The floats, computed in float32."""
        w = self.values.astype(jnp.float32)
        if self.zero is not None:
            w = w - spread(self.zero, w.shape)
        return (w * spread(self.scale, w.shape)).astype(dtype)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Rows along the first axis, float32: the lookup of an embedding."""

        def picked(a: Array) -> Array:
            n, size = a.shape[0], self.values.shape[0]
            return a[ids // (size // n)] if n > 1 else jnp.broadcast_to(a[0], (*ids.shape, *a.shape[1:]))

        zero = None if self.zero is None else picked(self.zero)
        return Quantized(self.values[ids], picked(self.scale), zero).dequantized()


def spread(a: Array, shape: tuple[int, ...]) -> Array:
    """Scales of blocks repeated to the shape of the values; axes of size 1 are left to broadcasting."""
    for axis, size in enumerate(shape):
        if a.shape[axis] not in (1, size):
            a = jnp.repeat(a, size // a.shape[axis], axis)
    return a


def round_int8(x: Float[Array, "... K"], scale: Array | None = None) -> tuple[Int[Array, "... K"], Array]:
    """x as int8, and its scale: the given one, otherwise one per row, from the row's largest magnitude."""
    y = x.astype(jnp.float32)
    if scale is None:
        top = jnp.max(jnp.abs(y), -1, keepdims=True)
        scale = jnp.where(top == 0, 1.0, top / 127)
    return jnp.clip(jnp.round(y / scale), -127, 127).astype(jnp.int8), scale
