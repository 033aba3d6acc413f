"""Number formats, and rounding to them.

A format is described by data: the elements that weights are rounded to, the number of weights that share a scale, and the type of
scales.

    scale = largest |w| of a block / the largest element        (`absmax`)
    w ~ element * scale - minimum

Scales of MX formats are powers of two: 2^(floor(log2(largest |w|)) - the exponent of the largest element). Numbers above the largest
element saturate (OCP Microscaling Formats 1.0, section 6.3; arXiv:2310.10537). NVFP4 has scales in e4m3, and a second-level float32
scale for the whole weight (NVIDIA, arXiv:2509.25149).

Values that are not finite are defined for every format: a block with NaN or an infinity decodes to NaN, so that a fault stays visible.
A block of zeros, or a block whose scale would not be a normal float32, decodes to zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.ops.quantized import Quantized, packed_codes, spread

Weight = Float[Array | np.ndarray, "..."]
TINY = float(np.finfo(np.float32).tiny)


class Limits(NamedTuple):
    """The represented range of each block, from `low` to `high`, or from -high to high if `low` is None. The arrays are float32 and
    have the shape of scales."""

    high: Array
    low: Array | None = None


class Integers(NamedTuple):
    """Integers in two's complement.

    bits: the number of bits, 8, 4 or 2.
    """

    bits: int


class Minifloats(NamedTuple):
    """Floats of few bits, as a table. `magnitudes` are ordered by their codes without the sign, which is the highest bit. Ties are
    rounded to the even code, as in IEEE 754."""

    bits: int
    magnitudes: tuple[float, ...]


class Levels(NamedTuple):
    """Arbitrary numbers, in ascending order. Weights are rounded to the nearest."""

    bits: int
    levels: tuple[float, ...]


class Floats(NamedTuple):
    """Floats of a type that jax has."""

    dtype: Any
    bits: int = 8


Elements = Integers | Minifloats | Levels | Floats


@dataclass(frozen=True)
class Format:
    """One number format.

    name: the name in settings and files.
    elements: the numbers that weights are rounded to.
    block: the default number of weights along the summed axes that share a scale. None means a whole channel.
    scales: the type in which scales are stored.
    source: the paper or specification that defines the format.
    """

    name: str
    elements: Elements
    block: int | None = None
    scales: Literal["float32", "e8m0", "e4m3"] = "float32"
    source: str = ""

    @property
    def bits(self) -> int:
        """The bits of each element."""
        return self.elements.bits

    @property
    def is_integer(self) -> bool:
        return isinstance(self.elements, Integers)

    @property
    def largest(self) -> float:
        """The element that the largest magnitude of a block is mapped to. For integers it is half of their range, 127.5 or 7.5, so that
        rounding also uses the most negative integer."""
        match self.elements:
            case Integers(bits):
                return (2**bits - 1) / 2
            case Minifloats(_, magnitudes):
                return magnitudes[-1]
            case Levels(_, levels):
                return max(map(abs, levels))
            case Floats(dtype, _):
                return float(jnp.finfo(dtype).max)

    def quantize(
        self, w: Weight, block: Sequence[int], calibration: str = "absmax", *, lead: int = 0, pack: int = 0
    ) -> Quantized:
        """Rounds a weight to nearest.

        Args:
            block: the number of weights that share a scale along each axis. Each number must divide the size of the axis.
            calibration: the represented range. `absmax` is symmetric, up to the largest magnitude. `minmax` is from the smallest to the
                largest weight, with a minimum, for integers only. `rms:K` is K root mean squares, and `fixed:X` is X, both symmetric.
            lead: the number of leading axes of layers and experts. Each of their entries is a separate weight.
            pack: the axis, as a negative index, along which codes of four or two bits are packed into bytes. 0 packs none.
        """
        return _quantized(self, jnp.asarray(w), tuple(block), calibration, lead, pack)

    def rounded(self, w: Weight, block: Sequence[int], limits: Limits, *, lead: int = 0, pack: int = 0) -> Quantized:
        """Rounds a weight within a given range of each block. Other arguments are those of `quantize`."""
        return _rounded_within(self, jnp.asarray(w), tuple(block), limits, lead, pack)

    def scaled(self, x: Float[Array, "..."], scale: Float[Array, "..."]) -> Quantized:
        """Rounds numbers with given scales, one per block. Values beyond the largest element saturate, and a block whose scale is NaN
        becomes NaN.

        Raises:
            ValueError: the scales of this format are not float32.
        """
        if self.scales != "float32":
            raise ValueError(f"{self.name} has scales in {self.scales}, none that are given")
        return _in_elements(self, x, scale.astype(jnp.float32), None, jnp.isfinite(scale), 0)


@partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def _quantized(format: Format, w: Array, block: tuple[int, ...], calibration: str, lead: int, pack: int) -> Quantized:
    return _rounded(format, w, block, limits_of(w, block, calibration), lead, pack)


def limits_of(w: Weight, block: Sequence[int], calibration: str) -> Limits:
    """Returns the represented range of each block.

    Raises:
        ValueError: the calibration is unknown.
    """
    tiles, axes = in_blocks(jnp.asarray(w, jnp.float32), block)
    kind, _, number = calibration.partition(":")
    largest = jnp.max(jnp.abs(tiles), axes)
    if calibration == "absmax":
        return Limits(largest)
    if calibration == "minmax":
        # Zero is always represented.
        return Limits(jnp.maximum(jnp.max(tiles, axes), 0), jnp.minimum(jnp.min(tiles, axes), 0))
    if kind == "rms":
        return Limits(float(number) * jnp.sqrt(jnp.mean(jnp.square(tiles), axes)))
    if kind == "fixed":
        return Limits(jnp.where(jnp.isfinite(largest), float(number), jnp.nan))
    raise ValueError(f"calibration `{calibration}`: absmax, minmax, rms:K or fixed:X")


def in_blocks(w: Array, block: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """Reshapes a weight so that each axis becomes two: blocks, and positions within a block. Returns it with the indices of the axes of
    positions."""
    shape = [n for size, each in zip(w.shape, block, strict=True) for n in (size // each, each)]
    return w.reshape(shape), tuple(range(1, len(shape), 2))


def _rounded(format: Format, w: Array, block: tuple[int, ...], limits: Limits, lead: int, pack: int) -> Quantized:
    high = limits.high.astype(jnp.float32)
    if limits.low is not None:
        return _asymmetric(format, w, high, limits.low.astype(jnp.float32), pack)
    scale, outer = _scales(format, high, lead)
    return _in_elements(format, w, scale, outer, jnp.isfinite(high), pack)


# This is one program, because its thirty operations would otherwise be thirty programs of 1.5 MB for every shape, and need thirty
# arrays of the weight's size.
_rounded_within = jax.jit(_rounded, static_argnums=(0, 2, 4, 5))


def _in_elements(format: Format, w: Array, scale: Array, outer: Array | None, finite: Array, pack: int) -> Quantized:
    """Rounds a weight to the nearest elements.

    Args:
        scale, outer: the scales of both levels, float32.
        finite: whether each block is finite. Other blocks become NaN.
    """
    whole = scale if outer is None else scale * outer
    used = finite & (whole >= TINY)
    x = jnp.where(spread(used, w.shape), w.astype(jnp.float32), 0.0) / spread(jnp.where(used, whole, 1.0), w.shape)
    scale = _stored(format, jnp.where(used, scale, jnp.where(finite, 1.0, jnp.nan)))
    values: Any = {"levels": None}
    match format.elements:
        case Integers(8):
            return Quantized(jnp.clip(jnp.round(x), -128, 127).astype(jnp.int8), scale, outer=outer)
        case Integers(bits):
            half = 1 << (bits - 1)
            codes = (jnp.clip(jnp.round(x), -half, half - 1) + half).astype(jnp.uint8)
            values = {"zero": half}
        case Minifloats(bits, magnitudes):
            codes = _nearest(jnp.abs(x), magnitudes, to_even=True) | (jnp.signbit(x).astype(jnp.uint8) << (bits - 1))
            values = {"levels": (*magnitudes, *(-m for m in magnitudes))}
        case Levels(_, levels):
            codes, values = _nearest(x, levels), {"levels": levels}
        case Floats(dtype, _):
            most = format.largest
            return Quantized(jnp.clip(x, -most, most).astype(dtype), scale, outer=outer)
    codes, packing = _packed(codes, format.bits, pack)
    return Quantized(codes, scale, outer=outer, **packing, **values)


def _asymmetric(format: Format, w: Array, high: Array, low: Array, pack: int) -> Quantized:
    """Rounds to integers that represent the range from the smallest to the largest weight. The code of 0 is an integer, so that 0
    stays 0 (Jacob et al. 2017, arXiv:1712.05877, section 2.1)."""
    if not isinstance(format.elements, Integers):
        raise ValueError(f"{format.name} has no minimum: minmax is for integers")
    bits = format.bits
    scale = (high - low) / (2**bits - 1)
    finite = jnp.isfinite(scale)
    used = finite & (scale >= TINY)
    divisor = jnp.where(used, scale, 1.0)
    origin = jnp.where(used, jnp.round(-low / divisor), 0.0)
    x = jnp.where(spread(used, w.shape), w.astype(jnp.float32), 0.0) / spread(divisor, w.shape)
    codes = jnp.clip(jnp.round(x + spread(origin, w.shape)), 0, 2**bits - 1)
    scale = jnp.where(used, scale, jnp.where(finite, 1.0, jnp.nan))
    if bits == 8:
        return Quantized((codes - 128).astype(jnp.int8), scale, jnp.where(used, origin - 128, -128) * scale)
    codes, packing = _packed(codes.astype(jnp.uint8), bits, pack)
    return Quantized(codes, scale, origin * scale, **packing)


def _stored(format: Format, scale: Array) -> Array:
    """Converts float32 scales to the type in which they are stored."""
    if format.scales == "e8m0":
        exponents = jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23
        return jnp.where(jnp.isnan(scale), 255, exponents).astype(jnp.uint8)
    return scale.astype(jnp.float8_e4m3fn) if format.scales == "e4m3" else scale


def _scales(format: Format, high: Array, lead: int) -> tuple[Array, Array | None]:
    """Returns the scales of blocks, as float32 but rounded to their stored type, and the second-level scale (None if there is none)."""
    if format.scales == "e8m0":
        # Computed from the bits of floats, because a logarithm may round up to the next integer, and XLA's powers of two are not exact.
        exponent = (jax.lax.bitcast_convert_type(high, jnp.int32) >> 23) - 127 - (int(np.frexp(format.largest)[1]) - 1)
        power = jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
        return jnp.where(high > 0, power, high), None
    if format.scales == "e4m3":
        axes = tuple(range(lead, high.ndim))
        top = jnp.max(jnp.where(jnp.isfinite(high), high, 0.0), axes, keepdims=True)
        most = format.largest * float(jnp.finfo(jnp.float8_e4m3fn).max)
        outer = jnp.where(top > 0, top / most, 1.0)
        scale = jnp.where(jnp.isfinite(high), high, 0.0) / format.largest / outer
        return scale.astype(jnp.float8_e4m3fn).astype(jnp.float32), outer
    return high / format.largest, None


def nearest_elements(format: Format, x: Array, *, is_asymmetric: bool = False) -> Array:
    """Returns the nearest elements, as float32, of numbers that have been divided by their scale.

    Args:
        x: the numbers.
        is_asymmetric: whether a minimum has been added to the numbers.
    """
    match format.elements:
        case Integers(bits):
            # Codes of eight bits are signed either way.
            low = 0 if is_asymmetric and bits < 8 else -(1 << (bits - 1))
            return jnp.clip(jnp.round(x), low, low + (1 << bits) - 1)
        case Minifloats(_, magnitudes):
            return jnp.copysign(jnp.asarray(np.asarray(magnitudes, np.float32))[_nearest(jnp.abs(x), magnitudes, to_even=True)], x)
        case Levels(_, levels):
            return jnp.asarray(np.asarray(levels, np.float32))[_nearest(x, levels)]
        case Floats(dtype, _):
            return jnp.clip(x, -format.largest, format.largest).astype(dtype).astype(jnp.float32)


def _nearest(x: Array, levels: Sequence[float], *, to_even: bool = False) -> Array:
    """Returns the index of the nearest level, which is the number of midpoints below x. If two levels are equally near, the lower one
    is taken, or with `to_even` the one with the even index."""
    between = (np.asarray(levels[1:], np.float32) + np.asarray(levels[:-1], np.float32)) / 2
    out = jnp.zeros(x.shape, jnp.uint8)
    for i, midpoint in enumerate(between):
        above = x >= midpoint if to_even and i % 2 else x > midpoint
        out = out + above.astype(jnp.uint8)
    return out


def _packed(codes: Array, bits: int, pack: int) -> tuple[Array, dict[str, Any]]:
    """Packs codes along an axis, if the number of bits and the size of the axis allow that. Returns them and the fields of `Quantized`
    that describe the packing."""
    if not pack or bits not in (2, 4) or codes.shape[pack] % (8 // bits):
        return codes, {}
    return packed_codes(codes, pack, bits), {"packed": pack, "bits": bits}
