"""A quantized array: values in few bits, and the numbers that turn them back into floats.

    w = (values - zero) * scale        or, with levels,        w = levels[values] * scale

`scale` and `zero` have as many axes as the values. Along each axis they have the full size (one scale per index), 1 (shared) or a
divisor of the size (one scale per block). So this one type covers scales per output channel, per input channel, per row of an
embedding and per block, in any number format. Codes of four bits lie two in a byte, because jax gives each element of an int4 array
its own byte on CPUs. `x_scale` says how activations are rounded before the product (W8A8).
`models.parts.einsum.contract` multiplies such an array with data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from argosy.ops.native.products import Panels

# The 16 levels of NormalFloat4: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (arXiv:2305.14314,
# appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Evenly spaced, and without -8, so that the levels are symmetric.
INT4 = tuple(level / 7 for level in range(-7, 8))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """values: integers or small floats; or packed ones, on a CPU (`ops.native.products`). scale, zero: float32, as described above.
    x_scale: the calibrated number by which activations are divided before they are rounded to int8.

    levels: the floats that values are indexes of. packed: the axis, counted from the end, along which two values of four bits share
    a byte; the array has half its size there. 0: none.
    """

    # Arrays; in a tree of the same structure, their shapes.
    values: Any
    scale: Any
    zero: Any = None
    x_scale: Any = None
    levels: tuple[float, ...] | None = field(default=None, metadata={"static": True})
    packed: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return unpacked_shape(self.values.shape, self.packed)

    @property
    def is_linear(self) -> bool:
        """Whether the values themselves can be multiplied, and scaled afterwards."""
        return self.levels is None and not self.packed

    def dequantized(self, dtype: Any = jnp.float32) -> Array:
        """The floats, computed in float32."""
        values = unpacked(self.values, self.packed) if self.packed else self.values
        values = values.dense() if isinstance(values, Panels) else values
        if self.levels is None:
            w = values.astype(jnp.float32)
        else:
            w = jnp.asarray(np.asarray(self.levels, np.float32))[values.astype(jnp.int32)]
        if self.zero is not None:
            w = w - spread(self.zero, w.shape)
        return (w * spread(self.scale, w.shape)).astype(dtype)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Rows along the first axis, float32: the lookup of an embedding."""

        def picked(a: Array) -> Array:
            n, size = a.shape[0], self.values.shape[0]
            return a[ids // (size // n)] if n > 1 else jnp.broadcast_to(a[0], (*ids.shape, *a.shape[1:]))

        zero = None if self.zero is None else picked(self.zero)
        values, packed = self.values, self.packed
        if packed == -len(values.shape):
            values, packed = unpacked(values, packed), 0
        values = values.rows(ids) if isinstance(values, Panels) else values[ids]
        return Quantized(values, picked(self.scale), zero, levels=self.levels, packed=packed).dequantized()


def spread(a: Array, shape: tuple[int, ...]) -> Array:
    """Scales of blocks repeated to the shape of the values; axes of size 1 are left to broadcasting."""
    for axis, size in enumerate(shape):
        if a.shape[axis] not in (1, size):
            a = jnp.repeat(a, size // a.shape[axis], axis)
    return a


def unpacked_shape(shape: Sequence[int], packed: int) -> tuple[int, ...]:
    """The shape of a weight from that of its values."""
    out = list(shape)
    if packed:
        out[packed] *= 2
    return tuple(out)


def packed_pairs(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Codes of four bits, two in a byte along an axis of even size, counted from the end: the first of each pair in the low bits."""
    pairs = codes.reshape(*codes.shape[: codes.ndim + axis], codes.shape[axis] // 2, 2, *_after(codes.shape, axis))
    first, second = (jnp.take(pairs, i, codes.ndim + axis + 1) for i in (0, 1))
    return first | (second << 4)


def unpacked(pairs: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """The codes again."""
    both = jnp.stack([pairs & 15, pairs >> 4], pairs.ndim + axis + 1)
    return both.reshape(unpacked_shape(pairs.shape, axis))


def _after(shape: Sequence[int], axis: int) -> Sequence[int]:
    return shape[len(shape) + axis + 1 :]


def round_int8(x: Float[Array, "... K"], scale: Array | None = None) -> tuple[Int[Array, "... K"], Array]:
    """x as int8, and its scale: the given one, otherwise one per row, from the row's largest magnitude."""
    y = x.astype(jnp.float32)
    if scale is None:
        top = jnp.max(jnp.abs(y), -1, keepdims=True)
        scale = jnp.where(top == 0, 1.0, top / 127)
    return jnp.clip(jnp.round(y / scale), -127, 127).astype(jnp.int8), scale
