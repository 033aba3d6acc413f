"""Arrays in eight bits, with a scale for each vector, for quantized KV caches.

    bits = round(x / scale),  scale = max |x| / largest      for each vector along the last axis, or each block of it
    x ~ bits * scale                                           int8: off by at most scale / 2

`largest` is 127 for int8, 448 for fp8_e4m3 and 57344 for fp8_e5m2 (`largest_magnitude`). A scale belongs to one token. What is stored
for a token therefore does not depend on other tokens, on the call that wrote it, or on the calibration of a model. If a vector has a
NaN or an infinity, the whole vector becomes NaN or infinite, so that an error upstream stays visible in the token where it happened.

Values are stored as raw bits, because XLA:CPU has no scatter of 8-bit floats. It would convert the whole pool to float16 and back for
every token that is written (27 ms instead of 0.7 for a pool of 17 MB). Scales are float32: a head of 64 features takes 68 bytes. With
bfloat16 scales it would take 66, but XLA:CPU also converts bfloat16 pools.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.ops.precision import wide
from argosy.ops.quantized import spread

FORMS = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def largest_magnitude(form: str) -> float:
    """Returns the largest magnitude of an 8-bit form. For int8 it is 127, so that rounding is symmetric."""
    return 127.0 if form == "int8" else float(jnp.finfo(FORMS[form]).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrow:
    """An array in eight bits. Shapes or partition specs may stand for the two arrays.

    bits: [... H] uint8, the values.
    scale: [... blocks] float32, one for each of the equal blocks of a vector.
    form: the type of the values, a key of `FORMS`.
    """

    bits: Any
    scale: Any
    form: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    def widened(self) -> Float[Array, "*any H"]:
        """Dequantizes the array to float32."""
        values = jax.lax.bitcast_convert_type(self.bits, FORMS[self.form]).astype(jnp.float32)
        return values * spread(self.scale, values.shape)


def empty(shape: tuple[int, ...], blocks: int, form: str) -> Narrow:
    """Returns an array of zeros of this shape, with `blocks` scales for each vector."""
    return Narrow(jnp.zeros(shape, jnp.uint8), jnp.zeros((*shape[:-1], blocks), jnp.float32), form)


def round_to_narrow(x: Float[Array, "*any H"], blocks: int, form: str) -> Narrow:
    """Quantizes x, rounding to nearest, ties to even.

    A vector whose scale would not be a normal float32 becomes zeros. Its largest magnitude is then below 1.5e-36 in int8, or 6.7e-34 in
    fp8_e5m2.

    Args:
        blocks: the number of scales for each vector.
        form: a key of `FORMS`.
    """
    parts = wide(x).reshape(*x.shape[:-1], blocks, x.shape[-1] // blocks)
    most = largest_magnitude(form)
    # Multiplies, because XLA may or may not rewrite a division by a constant as a product, and programs must store the same numbers.
    scale = (jnp.max(jnp.abs(parts), -1, keepdims=True) * (1 / most)).astype(jnp.float32)
    # NaN is not less than anything, so it stays NaN.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.ones((), jnp.float32), scale)
    # The ratio may exceed `most` because the scale is rounded, or it may be NaN. Eight bits can express neither.
    ratio = jnp.clip(parts / scale, -most, most)
    rounded = (jnp.round(ratio) if form == "int8" else ratio).astype(FORMS[form])
    return Narrow(jax.lax.bitcast_convert_type(rounded, jnp.uint8).reshape(x.shape), scale[..., 0], form)


def write_entries(pool: Any, where: tuple[Array, ...], new: Array) -> Any:
    """Writes new entries to a pool, which may be `Narrow`, and returns the new pool.

    Args:
        where: the index arrays of the entries. Entries out of range are dropped.
    """
    entries = round_to_narrow(new, pool.scale.shape[-1], pool.form) if isinstance(pool, Narrow) else new
    return jax.tree.map(lambda a, b: a.at[where].set(b.astype(a.dtype), mode="drop"), pool, entries)


def blocks_of(*sizes: int) -> int:
    """Returns the smallest number of equal blocks of a vector such that each block lies within one of the vector's consecutive parts.

    Args:
        sizes: the sizes of these parts.
    """
    return sum(sizes) // math.gcd(*sizes)
