"""Cross attention: every query sees all tokens of a memory, such as a text."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.ops.attention import Score, See, attention


def cross_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> Float[Array, "B T N H"]:
    """Computes attention in which every query sees all keys of its row."""
    rows, *sizes = len(q), q.shape[1], k.shape[1]
    at = [jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (rows, n)) for n in sizes]
    return attention(q, k, v, See(*at, causal=False), Score(q.shape[-1] ** -0.5))
