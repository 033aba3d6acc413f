"""A quantized array: values in few bits, with the scales to convert them back to floats.

    w = (values - zero) * scale - minimum        or, with levels,        w = levels[values] * scale - minimum

`scale` and `minimum` have as many axes as the values. Along each axis they have the full size (one scale per index), 1 (shared) or a
divisor of the size (one scale per block). This one type therefore covers scales per tensor, output channel, input channel, row of an
embedding, block and tile, in any number format. Scales may themselves be in eight bits (MX, NVFP4). `outer` then has a second-level
scale for each weight. Values of four or two bits are packed in bytes, because on CPUs jax gives each element of an int4 array a whole
byte. `activations` says how data is rounded before the product (W8A8). `models.parts.einsum.contract` multiplies such an array with
data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from argosy.ops.native.products import Panels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantized weight. Shapes may stand for the arrays.

    values: integers, 8-bit floats, or codes (indexes of `levels`). On a CPU, `values` may be `ops.native` panels, which hold the whole
        weight including scales.
    scale: float32 or float8_e4m3fn scales, or uint8 exponents of powers of two (`powers_of_two`).
    minimum: float32, with axes as `scale`. None: 0.
    outer: float32, the second-level scale, a factor on `scale`. None: 1.
    x_scale: the calibrated scale of all activations, by which they are divided before rounding. Stacked layers have one each. None:
        each token has its own scale, from its largest magnitude.
    levels: the floats that codes stand for. None: values are numbers.
    packed: the axis, counted from the end, along which several values share a byte. The array is smaller along it. 0: none.
    bits: the bits of each packed value, 4 or 2.
    zero: the zero point, which is subtracted from values.
    activations: how the data of a product is rounded (`adapt.formats.activations`). None: it is not rounded.
    """

    values: Any
    scale: Any
    minimum: Any = None
    outer: Any = None
    x_scale: Any = None
    levels: tuple[float, ...] | None = field(default=None, metadata={"static": True})
    packed: int = field(default=0, metadata={"static": True})
    bits: int = field(default=4, metadata={"static": True})
    zero: int = field(default=0, metadata={"static": True})
    activations: Any = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return unpacked_shape(self.values.shape, self.packed, self.bits)

    @property
    def is_linear(self) -> bool:
        """Whether data can be multiplied with the values themselves and scaled afterwards."""
        return self.levels is None and not self.packed and self.zero == 0

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(self))

    @property
    def scales(self) -> Float[Array, "..."]:
        """The scales in float32, with the second level multiplied in."""
        scale = powers_of_two(self.scale) if self.scale.dtype == jnp.uint8 else self.scale.astype(jnp.float32)
        return scale if self.outer is None else scale * self.outer

    def dequantized(self, dtype: Any = jnp.float32) -> Array:
        """Dequantizes the weight in float32, then converts it to `dtype`."""
        if isinstance(self.values, Panels):
            return self.values.dense().astype(dtype)
        values = unpack_codes(self.values, self.packed, self.bits) if self.packed else self.values
        if self.levels is None:
            w = values.astype(jnp.float32)
        else:
            w = jnp.asarray(np.asarray(self.levels, np.float32))[values.astype(jnp.int32)]
        w = w - self.zero if self.zero else w
        w = w * spread(self.scales, w.shape)
        return (w if self.minimum is None else w - spread(self.minimum, w.shape)).astype(dtype)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Looks up rows along the first axis, as an embedding does. Returns float32."""
        values, packed = self.values, self.packed
        if isinstance(values, Panels):
            return values.rows(ids)
        if packed == -len(values.shape):
            values, packed = unpack_codes(values, packed, self.bits), 0
        size = values.shape[0]

        def picked(a: Array | None) -> Array | None:
            if a is None:
                return None
            return a[ids // (size // a.shape[0])] if a.shape[0] > 1 else jnp.broadcast_to(a[0], (*ids.shape, *a.shape[1:]))

        fields: Any = {name: picked(getattr(self, name)) for name in ("scale", "minimum", "outer")}
        return replace(self, values=values[ids], **fields, packed=packed).dequantized()


def powers_of_two(exponents: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Converts exponents e to 2^(e - 127) in float32, and 255 to NaN.

    This is the type E8M0 of OCP Microscaling Formats 1.0, for which array files have no dtype.
    """
    # Assembles the bits of a float32. Exponent 0 is half of the smallest normal float32.
    bits = jnp.where(exponents == 0, 1 << 22, exponents.astype(jnp.int32) << 23)
    return jnp.where(exponents == 255, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))


def spread(a: Array, shape: tuple[int, ...]) -> Array:
    """Repeats scales of blocks to the shape of the values. Axes of size 1 are left as they are, for broadcasting."""
    for axis, size in enumerate(shape):
        if a.shape[axis] not in (1, size):
            a = jnp.repeat(a, size // a.shape[axis], axis)
    return a


def unpacked_shape(shape: Sequence[int], packed: int, bits: int = 4) -> tuple[int, ...]:
    """Returns the shape of a weight from the shape of its packed values. `packed` and `bits` as in `Quantized`."""
    out = list(shape)
    if packed:
        out[packed] *= 8 // bits
    return tuple(out)


def packed_codes(codes: UInt8[Array, "..."], axis: int, bits: int = 4) -> UInt8[Array, "..."]:
    """Packs several codes of few bits into each byte, the first code in the lowest bits.

    Args:
        axis: the axis along which codes are packed, counted from the end. Its size must be a multiple of 8 / bits.
    """
    count, at = 8 // bits, codes.ndim + axis
    parts = codes.reshape(*codes.shape[:at], codes.shape[axis] // count, count, *_sizes_after(codes.shape, axis))
    out = jnp.take(parts, 0, at + 1)
    for i in range(1, count):
        out = out | (jnp.take(parts, i, at + 1) << (bits * i))
    return out


def unpack_codes(values: UInt8[Array, "..."], axis: int, bits: int = 4) -> UInt8[Array, "..."]:
    """The inverse of `packed_codes`."""
    parts = [values >> (bits * i) & ((1 << bits) - 1) for i in range(8 // bits)]
    return jnp.stack(parts, values.ndim + axis + 1).reshape(unpacked_shape(values.shape, axis, bits))


def _sizes_after(shape: Sequence[int], axis: int) -> Sequence[int]:
    return shape[len(shape) + axis + 1 :]
