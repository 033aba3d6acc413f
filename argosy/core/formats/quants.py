"""Decodes quantized weights to float32: GGUF's block types, and weights with a separate tensor of scales.

In nearly every format, numbers are bit fields stored in planes (`_planes`), times a scale. Each function takes blocks as bytes, uint8
[n, bytes], and returns float32 [n, values]. The results are bit for bit those of ggml, with products and sums in ggml's order. Layouts:
ggml-common.h (Q*_K, IQ* by I. Kawrakow, TQ* by F. Mathieu); MXFP4: OCP Microscaling formats 1.0. This module does not read files: raw
bytes come from `gguf` or `safetensors`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from argosy.core.errors import BadInput, Damaged, Unsupported
from argosy.core.formats import Shape

# The number of values that are decoded at once. Temporaries of 256 KB stay in the CPU cache, and little memory beyond the output is
# needed.
CHUNK = 1 << 16

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_GGML = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled, and without -0
_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _unsigned_e4m3() -> np.ndarray:
    """All 256 values of ggml's unsigned e4m3: the sign bit is ignored, and 0x7F is zero."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 0xF, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(code == 0x7F, 0, value).astype(np.float32)


_UE4M3 = _unsigned_e4m3()


def _planes(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Unpacks bit fields, uint8 [n, m] -> [n, m * 8 / bits]. The lowest fields of each `width` bytes come first, then the next ones."""
    n, m = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(n, m // width, 1, width) >> shifts & np.uint8(2**bits - 1)
    return fields.reshape(n, -1)


def _half(packed: np.ndarray) -> np.ndarray:
    """Converts two bytes of float16, uint8 [n, 2], to float32 [n, 1]."""
    return np.ascontiguousarray(packed).view("<f2").astype(np.float32)


def _groups(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Groups values [n, values] as float32 [n, groups, size], with one group per scale, [n, groups]."""
    return q.astype(np.float32).reshape(*scale.shape, -1)


class IntegerBlocks(NamedTuple):
    """Blocks of integers: w = scale * q - minimum, with an exact product.

    q: int8 [n, values], the integers.
    scale, minimum: float32 [n, groups], one for each group of neighboring values; minimum is None if it is 0.
    """

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None = None

    def decoded(self) -> np.ndarray:
        return _scaled(*self)


def _scaled(q: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> np.ndarray:
    """Computes scale * q - minimum, float32 [n, values], with one scale and one minimum per group of values."""
    y = scale[..., None] * _groups(q, scale)
    if minimum is not None:
        y -= minimum[..., None]
    return y.reshape(len(q), -1)


def _signed(q: np.ndarray, offset: int) -> np.ndarray:
    """Subtracts the offset from unsigned numbers of less than eight bits, uint8 -> int8."""
    return q.view(np.int8) - np.int8(offset)


# ---- 32 values per block


def _q4_0(b: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(_signed(_planes(b[:, 2:], 4, 16), 8), _half(b[:, :2]))


def _q4_1(b: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(_signed(_planes(b[:, 4:], 4, 16), 0), _half(b[:, :2]), -_half(b[:, 2:4]))


def _q5_0(b: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(_signed(_planes(b[:, 6:], 4, 16) | _planes(b[:, 2:6], 1, 1) << 4, 16), _half(b[:, :2]))


def _q5_1(b: np.ndarray) -> IntegerBlocks:
    q = _planes(b[:, 8:], 4, 16) | _planes(b[:, 4:8], 1, 1) << 4
    return IntegerBlocks(_signed(q, 0), _half(b[:, :2]), -_half(b[:, 2:4]))


def _q8_0(b: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(b[:, 2:].view(np.int8), _half(b[:, :2]))


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _half(b[:, :2]) * _NON_LINEAR[_planes(b[:, 2:], 4, 16)]


def _mxfp4(b: np.ndarray) -> np.ndarray:
    return _power(b[:, :1], 128) * _FP4_GGML[_planes(b[:, 1:], 4, 16)]


def _power(exponent: np.ndarray, bias: int) -> np.ndarray:
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - bias)


def _nvfp4(b: np.ndarray) -> np.ndarray:
    """Decodes NVFP4: 64 values in four groups of 16, each with an unsigned e4m3 scale."""
    return _scaled(_FP4_GGML[_planes(b[:, 4:], 4, 8)], _UE4M3[b[:, :4]] * np.float32(0.5))


# ---- 256 values per block, with scales for the groups inside


def _q2_k(b: np.ndarray) -> IntegerBlocks:
    scales, d, least = b[:, :16], _half(b[:, 80:82]), _half(b[:, 82:84])
    return IntegerBlocks(_signed(_planes(b[:, 16:80], 2, 32), 0), d * (scales & 0xF), least * (scales >> 4))


def _q3_k(b: np.ndarray) -> IntegerBlocks:
    high, low, d = b[:, :32], b[:, 32:96], _half(b[:, 108:110])
    scales = _planes(b[:, 96:104], 4, 8) | _planes(b[:, 104:108], 2, 4) << 4
    q = _signed(_planes(low, 2, 32) | _planes(high, 1, 32) << 2, 4)
    return IntegerBlocks(q, d * _signed(scales, 32))


def _scales_and_minima(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks eight scales and eight minima of 6 bits from 12 bytes. The bits of the first four are contiguous, and those of the others
    are in two places."""
    d, m, low = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scales = np.concatenate([d & 0x3F, low & 0xF | d >> 2 & 0x30], axis=1)
    minima = np.concatenate([m & 0x3F, low >> 4 | m >> 2 & 0x30], axis=1)
    return scales, minima


def _q4_k(b: np.ndarray) -> IntegerBlocks:
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _signed(_planes(b[:, 16:], 4, 32), 0)
    return IntegerBlocks(q, _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima)


def _q5_k(b: np.ndarray) -> IntegerBlocks:
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _planes(b[:, 48:], 4, 32) | _planes(b[:, 16:48], 1, 32) << 4
    return IntegerBlocks(_signed(q, 0), _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima)


def _q6_k(b: np.ndarray) -> IntegerBlocks:
    q = _signed(_planes(b[:, :128], 4, 64) | _planes(b[:, 128:192], 2, 32) << 4, 32)
    return IntegerBlocks(q, _half(b[:, 208:]) * b[:, 192:208].view(np.int8))


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    scales = _planes(b[:, 4:8], 4, 1) | _planes(b[:, 2:4], 2, 1) << 4
    return _scaled(_NON_LINEAR[_planes(b[:, 8:], 4, 16)], _half(b[:, :2]) * _signed(scales, 32))


def _tq1_0(b: np.ndarray) -> np.ndarray:
    """Decodes TQ1_0: five ternary digits per byte. After a multiplication by 3^k modulo 256, the k-th digit is the highest."""
    q = np.concatenate([_ternary(b[:, :32], 5), _ternary(b[:, 32:48], 5), _ternary(b[:, 48:52], 4)], axis=1)
    return _half(b[:, 52:]) * _signed((q.astype(np.uint16) * 3 >> 8).astype(np.uint8), 1)


def _ternary(packed: np.ndarray, digits: int) -> np.ndarray:
    powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)
    return (packed[:, None, :] * powers[:, None]).reshape(len(packed), -1)


def _tq2_0(b: np.ndarray) -> np.ndarray:
    return _half(b[:, 64:]) * _signed(_planes(b[:, :64], 2, 32), 1)


def _bf16(b: np.ndarray) -> np.ndarray:
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


# ---- the table


@dataclass(frozen=True)
class Type:
    """A GGUF type.

    name: ggml's name.
    values, bytes: the number of values and of bytes in a block.
    decode: decodes blocks, uint8 [n, bytes], to float32 or to integers with scales; None: not supported, or not necessary.
    dtype: the numpy type, if the bytes are plain numbers; else None.
    """

    name: str
    values: int
    bytes: int
    decode: Callable[[np.ndarray], "np.ndarray | IntegerBlocks"] | None = None
    dtype: np.dtype | None = None


def _plain(name: str, dtype: object) -> Type:
    dtype = np.dtype(dtype)  # type: ignore[call-overload]
    return Type(name, 1, dtype.itemsize, None, dtype)


# The types by ggml's number. Of types without a function, only the size is known: files with such tensors can be opened, but reading
# one of these tensors fails.
TYPES: dict[int, Type] = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: Type("Q4_0", 32, 18, _q4_0),
    3: Type("Q4_1", 32, 20, _q4_1),
    6: Type("Q5_0", 32, 22, _q5_0),
    7: Type("Q5_1", 32, 24, _q5_1),
    8: Type("Q8_0", 32, 34, _q8_0),
    9: Type("Q8_1", 32, 36),
    10: Type("Q2_K", 256, 84, _q2_k),
    11: Type("Q3_K", 256, 110, _q3_k),
    12: Type("Q4_K", 256, 144, _q4_k),
    13: Type("Q5_K", 256, 176, _q5_k),
    14: Type("Q6_K", 256, 210, _q6_k),
    15: Type("Q8_K", 256, 292),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18, _iq4_nl),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136, _iq4_xs),
    24: _plain("I8", "i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2, _bf16, np.dtype(ml_dtypes.bfloat16)),
    34: Type("TQ1_0", 256, 54, _tq1_0),
    35: Type("TQ2_0", 256, 66, _tq2_0),
    39: Type("MXFP4", 32, 17, _mxfp4),
    40: Type("NVFP4", 64, 36, _nvfp4),
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
# The types that are decoded to integers with scales (`IntegerBlocks`), with the smallest and the largest integer of each.
CODES = {
    "Q2_K": (0, 3), "Q3_K": (-4, 3), "Q4_0": (-8, 7), "Q4_1": (0, 15), "Q4_K": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31),
    "Q5_K": (0, 31), "Q6_K": (-32, 31), "Q8_0": (-128, 127),
}  # fmt: skip


def blocks(name: str, raw: np.ndarray) -> IntegerBlocks:
    """Decodes raw blocks of a type in `CODES`, uint8 [rows, k * bytes], to integers with scales: q is [rows, k * values], and scales
    and minima are [rows, k * groups]."""
    kind = BY_NAME[name]
    # Infinite scales come from the file itself.
    with np.errstate(all="ignore"):
        integers = kind.decode(np.ascontiguousarray(raw.reshape(-1, kind.bytes))) if kind.decode else None
    assert isinstance(integers, IntegerBlocks)
    rows = len(raw)
    minimum = None if integers.minimum is None else integers.minimum.reshape(rows, -1)
    return IntegerBlocks(integers.q.reshape(rows, -1), integers.scale.reshape(rows, -1), minimum)


def dequantize(name: str, raw: np.ndarray) -> np.ndarray:
    """Decodes raw blocks of the type with this name, uint8 [... k * bytes] -> float32 [... k * values].

    Raises:
        Unsupported: the type cannot be decoded.
        ValueError: the last axis is not a whole number of blocks.
    """
    kind = BY_NAME.get(name)
    if kind is None or kind.decode is None:
        names = ", ".join(k.name for k in TYPES.values() if k.decode)
        raise Unsupported(f"the GGUF type {name} cannot be decoded", hint=f"types that can be: {names}")
    if raw.shape[-1] % kind.bytes:
        raise ValueError(f"{raw.shape[-1]} bytes are not a whole number of {name} blocks of {kind.bytes}")
    blocks = raw.reshape(-1, kind.bytes)
    out = np.empty((len(blocks), kind.values), np.float32)
    step = max(1, CHUNK // kind.values)
    # Infinite scales come from the file itself.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            values = kind.decode(np.ascontiguousarray(blocks[start : start + step]))
            out[start : start + step] = values.decoded() if isinstance(values, IntegerBlocks) else values
    return out.reshape(*raw.shape[:-1], raw.shape[-1] // kind.bytes * kind.values)


# ---- a tensor of values and a tensor of scales, as in Hub folders


@dataclass(frozen=True)
class Scaled:
    """A way to store a weight as a tensor of values and a tensor of scales.

    shapes: shape of the weight -> shapes of the stored tensors.
    read: (values, scales) -> the weight, float32.
    """

    shapes: Callable[[Shape], tuple[Shape, ...]]
    read: Callable[..., np.ndarray]


def _fp8_shapes(shape: Shape) -> tuple[Shape, ...]:
    rows, columns = shape
    return (shape, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))


def _fp8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Multiplies each 128 x 128 tile of an fp8 matrix by its scale (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""
    if values.dtype.itemsize != 1 or values.dtype.kind in "iub":
        raise Damaged(f"fp8 values are stored as {values.dtype}", hint="is this weight really stored in fp8 blocks?")
    if scales.dtype.kind in "iub" or scales.dtype.itemsize < 2:
        raise Damaged(f"scales of fp8 blocks are stored as {scales.dtype}")
    if not np.isfinite(np.asarray(scales, np.float32)).all():
        raise Damaged("a scale of fp8 blocks is not finite")
    out = np.empty(values.shape, np.float32)
    for i, row in enumerate(np.asarray(scales, np.float32)):
        rows = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
        out[rows] = values[rows].astype(np.float32) * row.repeat(FP8_BLOCK)[: values.shape[1]]
    return out


def _mxfp4_shapes(shape: Shape) -> tuple[Shape, ...]:
    *lead, last = shape
    if last % 32:
        raise BadInput(f"MXFP4 has one scale for 32 values, but the last axis has {last}")
    return ((*lead, last // 32, 16), (*lead, last // 32))


def _mxfp4_pairs(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes MXFP4: uint8 blocks [... G 16] of neighboring pairs, low nibble first, with e8m0 scales [... G], to float32 [... 32
    G]."""
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise Damaged(f"MXFP4 blocks and scales are stored as {blocks.dtype} and {scales.dtype}, not as bytes")
    if (scales == 255).any():
        raise Damaged("an MXFP4 scale of 255 does not stand for a number")
    out = np.empty((*scales.shape, 16, 2), np.float32)
    with np.errstate(over="ignore"):
        # One expert at a time, so that temporaries have its size.
        for at in range(len(scales)):
            power = _power(scales[at], 127)[..., None]
            out[at, ..., 0] = _FP4[blocks[at] & 0xF] * power
            out[at, ..., 1] = _FP4[blocks[at] >> 4] * power
    return out.reshape(*scales.shape[:-1], -1)


FP8_BLOCK = 128
SCALED: dict[str, Scaled] = {"fp8_blocks": Scaled(_fp8_shapes, _fp8), "mxfp4": Scaled(_mxfp4_shapes, _mxfp4_pairs)}
