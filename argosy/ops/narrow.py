"""Arrays in eight bits, each vector with a scale of its own: what a quantized cache keeps.

    bits = round(x / scale),  scale = max |x| / largest      for each vector along the last axis, or each block of it
    x ~ bits * scale                                           int8: off by at most scale / 2

`largest_magnitude` is 127 for int8, 448 for fp8_e4m3 and 57344 for fp8_e5m2. A scale belongs to one token, so what is stored for a
token does not depend on other tokens, on the call that wrote it, or on the calibration of a model. A scale that is NaN or infinite
makes its vector so: a fault upstream stays visible, in the token that it struck.

The values lie as raw bits, because XLA:CPU has no scatter of 8-bit floats: it would convert the whole pool to float16 and back for
every token that is written (27 ms instead of 0.7 for a pool of 17 MB). Scales are float32: for heads of 64 the cache has 68 bytes a
head. In bfloat16 it would have 66, and XLA:CPU converts such pools too.
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
    """The largest magnitude of this form; of int8 127, so that rounding is symmetric."""
    return 127.0 if form == "int8" else float(jnp.finfo(FORMS[form]).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrow:
    """An array in eight bits: `bits` [... H] uint8, and `scale` [... blocks] float32, one for each of the equal blocks of a vector.
    form: a key of `FORMS`. Shapes or layouts may stand for the arrays."""

    bits: Any
    scale: Any
    form: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    def widened(self) -> Float[Array, "*any H"]:
        """The numbers that the bits stand for, in float32."""
        values = jax.lax.bitcast_convert_type(self.bits, FORMS[self.form]).astype(jnp.float32)
        return values * spread(self.scale, values.shape)


def empty(shape: tuple[int, ...], blocks: int, form: str) -> Narrow:
    """Zeros."""
    return Narrow(jnp.zeros(shape, jnp.uint8), jnp.zeros((*shape[:-1], blocks), jnp.float32), form)


def round_to_narrow(x: Float[Array, "*any H"], blocks: int, form: str) -> Narrow:
    """x rounded to nearest, ties to even. A vector whose scale would be no normal float32 becomes zeros: largest
    magnitudes below 1.5e-36 in int8, 6.7e-34 in fp8_e5m2."""
    parts = wide(x).reshape(*x.shape[:-1], blocks, x.shape[-1] // blocks)
    most = largest_magnitude(form)
    # XLA may or may not compile a division by a constant as this product, and programs must agree on what they store.
    scale = (jnp.max(jnp.abs(parts), -1, keepdims=True) * (1 / most)).astype(jnp.float32)
    # NaN is not below anything, and stays.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.ones((), jnp.float32), scale)
    # Above `most` by rounding of the scale, or NaN: neither has a meaning in eight bits.
    ratio = jnp.clip(parts / scale, -most, most)
    rounded = (jnp.round(ratio) if form == "int8" else ratio).astype(FORMS[form])
    return Narrow(jax.lax.bitcast_convert_type(rounded, jnp.uint8).reshape(x.shape), scale[..., 0], form)


def write_entries(pool: Any, where: tuple[Array, ...], new: Array) -> Any:
    """A pool, plain or `Narrow`, with new entries at some places; those out of range are dropped."""
    entries = round_to_narrow(new, pool.scale.shape[-1], pool.form) if isinstance(pool, Narrow) else new
    return jax.tree.map(lambda a, b: a.at[where].set(b.astype(a.dtype), mode="drop"), pool, entries)


def blocks_of(*sizes: int) -> int:
    """The fewest blocks of equal size such that no block reaches into two of these consecutive parts of a vector."""
    return sum(sizes) // math.gcd(*sizes)
