"""The short causal convolution of recurrent layers: depthwise, over a few tokens, with a state of inputs from call to call.

The convolution is computed as a sum of shifted copies, which XLA fuses into one pass: a kernel size of four is too small for a
convolution routine. This module knows nothing of caches. The caller says where sequences start and which tokens are real.
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
    """Computes y[t] = sum over i of w[i] x[t - (W-1) + i]. Also returns the last W-1 inputs, which the next call needs as `before`.

    Args:
        before: the W-1 inputs before x. They may have any values if the first token starts a sequence.
        starts: whether a token starts a sequence. For that sequence, earlier inputs count as zero.
        live: which tokens are real. If the returned inputs are used, real tokens must come first in each row.
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
    """Adds axes of size 1 to an array [B T], so that it has as many axes as x."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
