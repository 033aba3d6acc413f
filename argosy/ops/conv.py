"""The short causal convolution of recurrent layers: each channel separately, over a few tokens back, with the inputs that one
call leaves for the next.

It is computed as a sum of shifted copies: four taps are too few for a convolution routine, and XLA fuses them into one pass. This
module knows nothing of caches: the caller says where sequences start and which tokens are real.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from argosy.ops.precision import sums_in


def causal_conv(
    x: Float[Array, "B T *C"],
    w: Float[Array, "*C W"],
    before: Float[Array, "B W-1 *C"],
    starts: Bool[Array, "B T"],
    live: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
    """y[t] = sum over i of w[i] x[t - (W-1) + i], tap W-1 on the token itself; and the inputs that the next call needs.

    Args:
        before: the inputs just before these; any values if the first token starts a sequence.
        starts: a sequence starts here, and inputs before it count as zero.
        live: the real tokens, which must come first in each row if the returned inputs are used.
    """
    T, back = x.shape[1], w.shape[-1] - 1
    starts = starts & live
    before = jnp.where(_wide(starts[:, :1], x), 0, before.astype(x.dtype))
    x = jnp.concatenate([before, x], 1)
    sequence = jnp.concatenate([jnp.zeros_like(starts, jnp.int32, shape=(starts.shape[0], back)), _count(starts)], 1)
    token_sequence = sequence[:, back:]
    y = jnp.zeros_like(x[:, back:], sums_in(x.dtype))
    for i in range(back + 1):
        seen = jnp.where(_wide(sequence[:, i : i + T] == token_sequence, x), x[:, i : i + T], 0)
        y = y + seen.astype(y.dtype) * w[..., i].astype(y.dtype)
    at = jnp.sum(live, 1, dtype=jnp.int32)[:, None] + jnp.arange(back, dtype=jnp.int32)
    last = jnp.max(jnp.where(live, token_sequence, 0), 1, keepdims=True)
    same = jnp.take_along_axis(sequence, at, 1) == last
    return y.astype(x.dtype), jnp.where(_wide(same, x), jnp.take_along_axis(x, _wide(at, x), 1), 0)


def _count(starts: Bool[Array, "B T"]) -> Array:
    return jax.lax.cumsum(starts.astype(jnp.int32), 1)


def _wide(mask: Array, x: Array) -> Array:
    """[B T] broadcast to as many axes as x."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
