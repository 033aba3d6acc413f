"""Encodes float32 as GGUF's block types: the inverse of `quants`.

Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are bit for bit equal to gguf-py's quantizers (ggml-org/llama.cpp, gguf-py/gguf/quants.py). Q4_K, Q5_K
and Q6_K use the searches of ggml's reference without importances (`make_qkx2_quants` and `make_qx_quants` in ggml-quants.c). They try
several scales, fit scale and minimum by least squares for each, and keep the one with the smallest weighted error. Two things differ
from ggml. Sums are numpy's, so if two scales have equal errors up to rounding, the other one may be chosen. Codes under a scale of 0
are 0, because all codes decode to the same number then.

A block with a number that is not finite, or with a scale beyond float16, becomes NaN. Blocks of zeros become zeros.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from argosy.core.formats.quants import BY_NAME, CHUNK
from argosy.core.process.cores import core_count

# No type has a scale for numbers of this size and larger. The squares of smaller numbers are finite.
_BEYOND = np.float32(1e9)
# A group of Q6_K whose numbers are all smaller than this counts as zeros in ggml.
_ALL_ZEROS = np.float32(1e-15)


def encode(name: str, w: np.ndarray) -> np.ndarray:
    """Encodes numbers as blocks, float32 [... k * values] -> uint8 [... k * bytes]. Chunks are encoded on all cores.

    Args:
        name: the name of the block type, a key of ENCODERS.

    Raises:
        KeyError: there is no encoder for this type.
        ValueError: the last axis is not a whole number of blocks.
    """
    kind, encoder = BY_NAME[name], ENCODERS[name]
    if w.shape[-1] % kind.values:
        raise ValueError(f"{w.shape[-1]} numbers are not a whole number of {name} blocks of {kind.values}")
    blocks = np.ascontiguousarray(w, np.float32).reshape(-1, kind.values)
    out = np.empty((len(blocks), kind.bytes), np.uint8)
    step = max(1, CHUNK // kind.values)

    def encode_chunk(start: int) -> None:
        # `_defined` handles numbers that are not finite.
        with np.errstate(all="ignore"):
            out[start : start + step] = _defined(name, blocks[start : start + step], encoder)

    starts = range(0, len(blocks), step)
    if len(starts) < 2:
        for start in starts:
            encode_chunk(start)
    else:
        with ThreadPoolExecutor(core_count()) as pool:
            list(pool.map(encode_chunk, starts))
    return out.reshape(*w.shape[:-1], w.shape[-1] // kind.values * kind.bytes)


def _defined(name: str, x: np.ndarray, encoder: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Encodes blocks. A block becomes NaN if a number or a scale is not finite."""
    # NaN compares as False, so it counts as broken too.
    broken = np.logical_not(np.all(np.abs(x) < _BEYOND, axis=1))
    out = encoder(np.where(broken[:, None], np.float32(0), x))
    halves = HALVES.get(name, slice(0, 2))
    broken |= np.logical_not(np.all(np.isfinite(np.ascontiguousarray(out[:, halves]).view("<f2")), axis=1))
    if broken.any():
        out[broken] = 0
        out[broken, halves] = np.tile(np.array([np.nan], "<f2").view(np.uint8), (halves.stop - halves.start) // 2)
    return out


def _packed(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Packs bit fields, uint8 [n, m * 8 / bits] -> [n, m]. The first fields are in the lowest bits of each `width` bytes."""
    count = 8 // bits
    fields = codes.reshape(len(codes), -1, count, width) << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(fields, axis=2).reshape(len(codes), -1)


def _half(scale: np.ndarray) -> np.ndarray:
    """Converts float32 [n, 1] to the two bytes of a float16, uint8 [n, 2]."""
    return scale.astype("<f2").view(np.uint8)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, or 0 where this is infinite because the scale is 0 or tiny."""
    inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


# ---- 32 values per block


def _q8_0(x: np.ndarray) -> np.ndarray:
    """Encodes Q8_0. Half-way numbers are rounded away from zero."""
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    q = whole + np.copysign(np.abs(scaled - whole) >= 0.5, scaled)
    return np.concatenate([_half(d), q.astype(np.int8).view(np.uint8)], 1)


def _by_largest(x: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the codes of each block, in which the number with the largest magnitude has the code 0, as in ggml's Q4_0 and
    Q5_0."""
    at = np.abs(x).argmax(1)[:, None]
    d = np.take_along_axis(x, at, 1) / np.float32(-half)
    codes = np.trunc(x * _inverse(d) + np.float32(half + 0.5))
    return d, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def _by_range(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scale, the smallest number and the codes of each block. `most` is the largest code."""
    least = x.min(1, keepdims=True)
    d = (x.max(1, keepdims=True) - least) / np.float32(most)
    codes = np.trunc((x - least) * _inverse(d) + np.float32(0.5))
    return d, least, np.clip(codes, 0, most).astype(np.uint8)


def _q4_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_largest(x, 8)
    return np.concatenate([_half(d), _packed(q, 4, 16)], 1)


def _q4_1(x: np.ndarray) -> np.ndarray:
    d, least, q = _by_range(x, 15)
    return np.concatenate([_half(d), _half(least), _packed(q, 4, 16)], 1)


def _q5_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_largest(x, 16)
    return np.concatenate([_half(d), _packed(q >> 4, 1, 1), _packed(q & 15, 4, 16)], 1)


def _q5_1(x: np.ndarray) -> np.ndarray:
    d, least, q = _by_range(x, 31)
    return np.concatenate([_half(d), _half(least), _packed(q >> 4, 1, 1), _packed(q & 15, 4, 16)], 1)


# ---- 256 values per block


def _scale_and_minimum(x: np.ndarray, most: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the minimum, which decoding subtracts, of each group of 32: x [n, groups, 32] -> two arrays [n, groups].

    Args:
        most: the largest code.
        first: the first of the numbers that are added to `most` for the scales to try.
        steps: the number of further such numbers, at distances of 0.1.
    """
    weights = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    shift, largest = np.minimum(x.min(-1), 0), x.max(-1)
    is_level = largest == shift
    of_weights, of_x = weights.sum(-1), (weights * x).sum(-1)

    def codes(count: Any) -> np.ndarray:
        """The codes for a scale that divides the range from the best minimum so far to the largest number by `count`."""
        scaled = x - shift[..., None]
        scaled *= (np.float32(count) / (largest - shift))[..., None]
        return np.clip(np.rint(scaled, out=scaled), 0, most, out=scaled)

    def error(q: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
        difference = scale[..., None] * q
        difference += shift[..., None]
        difference -= x
        difference *= difference
        difference *= weights
        return difference.sum(-1)

    scale = 1 / (np.float32(most) / (largest - shift))
    best = error(codes(most), scale, shift)
    for step in range(steps + 1):
        q = codes(np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(most))
        weighted = weights * q
        of_q, of_qx = weighted.sum(-1), (weighted * x).sum(-1)
        of_q2 = np.multiply(weighted, q, out=weighted).sum(-1)
        determinant = of_weights * of_q2 - of_q * of_q
        new = (of_weights * of_qx - of_x * of_q) / determinant
        shifted = (of_q2 * of_x - of_q * of_qx) / determinant
        above = shifted > 0
        new, shifted = np.where(above, of_qx / of_q2, new), np.where(above, 0, shifted)
        errors = error(q, new, shifted)
        better = (determinant > 0) & (errors < best)
        for target, value in ((best, errors), (scale, new), (shift, shifted)):
            target[better] = value[better]
    return np.where(is_level, 0, scale), -shift


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes the numbers of eight groups in six bits each, uint8 [n, 8]. Also returns their scale, [n, 1]."""
    most = np.maximum(values.max(1, keepdims=True), 0)
    codes = np.minimum(np.rint(np.where(most > 0, 63 / most, 0) * values), 63)
    return np.maximum(codes, 0).astype(np.uint8), most / np.float32(63)


def _with_minima(x: np.ndarray, most: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 16 bytes of Q4_K and Q5_K blocks (two float16, eight scales and eight minima of six bits), and the codes [n, 256]."""
    groups = x.reshape(-1, 8, 32)
    scales, minima = _scale_and_minimum(groups, most, first, steps)
    (s, d), (m, dmin) = _six_bits(scales), _six_bits(minima)
    low = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    head = np.concatenate([_half(d), _half(dmin), *low], 1)
    scale, shift = (a.astype("<f2").astype(np.float32) * b for a, b in ((d, s), (dmin, m)))
    codes = np.rint((groups + shift[..., None]) / scale[..., None])
    codes = np.where(scale[..., None] == 0, 0, np.clip(codes, 0, most))
    return head, codes.astype(np.uint8).reshape(-1, 256)


def _q4_k(x: np.ndarray) -> np.ndarray:
    head, q = _with_minima(x, 15, -1.0, 20)
    return np.concatenate([head, _packed(q, 4, 32)], 1)


def _q5_k(x: np.ndarray) -> np.ndarray:
    head, q = _with_minima(x, 31, -0.5, 15)
    return np.concatenate([head, _packed(q >> 4, 1, 32), _packed(q & 15, 4, 32)], 1)


def _scale_without_minimum(x: np.ndarray) -> np.ndarray:
    """The scale of each group, x [n, groups, 16] -> [n, groups], for codes from -32 to 31. Errors are weighted by the squares of x."""
    weights = x * x
    at = np.abs(x).argmax(-1)[..., None]
    largest = np.take_along_axis(x, at, -1)
    # Smaller than any quotient, so that the first scale is taken.
    best, scale = np.full(x.shape[:-1], -1, np.float32), np.zeros(x.shape[:-1], np.float32)
    for step in (0, *range(-9, 0), *range(1, 10)):
        q = np.clip(np.rint(-(32 + np.float32(0.1) * np.float32(step)) / largest * x), -32, 31)
        weighted = weights * q
        of_qx, of_q2 = (weighted * x).sum(-1), (weighted * q).sum(-1)
        better = (of_q2 > 0) & (of_qx * of_qx > best * of_q2)
        scale = np.where(better, of_qx / of_q2, scale)
        best = np.where(better, scale * of_qx, best)
    return np.where(np.abs(largest[..., 0]) < _ALL_ZEROS, np.float32(0), scale)


def _q6_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 16, 16)
    scales = _scale_without_minimum(groups)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    inverse = np.where(np.abs(largest) < _ALL_ZEROS, 0, np.float32(-128) / largest)
    d = _inverse(inverse)
    s = np.minimum(np.rint(inverse * scales), 127).astype(np.int8)
    scale = (d.astype("<f2").astype(np.float32) * s)[..., None]
    q = np.where(scale == 0, 0, np.clip(np.rint(groups / scale), -32, 31) + 32).astype(np.uint8).reshape(-1, 256)
    return np.concatenate([_packed(q & 15, 4, 64), _packed(q >> 4, 2, 32), s.view(np.uint8), _half(d)], 1)


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""By ggml's name of the type."""
# The bytes of a block that hold float16 numbers. In other types, these are the first two bytes.
HALVES = {"Q4_1": slice(0, 4), "Q5_1": slice(0, 4), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
