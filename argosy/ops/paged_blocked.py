"""Attention over pages, some of them at a time: a loop that ends where the longest row ends.

What a step costs follows from the tokens that its rows have, not from those that their tables have room for, and one program
serves every length. Parts are merged by their log-sum-exp. Blocks before every row's window are not read.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops import paged_attention as paged
from argosy.ops.attention import NOWHERE, UNSEEN, Implementation, Score, See, attention, merged
from argosy.ops.precision import sums_in, wide

BLOCK = 256  # tokens of a row that are read at a time


def blocked(
    q: Float[Array, "B T N H"],
    pools: tuple[Float[Array, "pages page K H"], Float[Array, "pages page K U"]],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> tuple[Array, Array] | Array:
    """As `paged_attention`."""
    pages, page = pools[0].shape[:2]
    each = max(1, BLOCK // page)
    size = each * page
    P = table.shape[1]
    if each >= P:
        return paged.reference(q, pools, table, lengths, at, score, lse=lse)
    table = jnp.pad(table, ((0, 0), (0, -P % each)), constant_values=-1)
    plain = replace(score, sinks=None)

    def part(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        mine = jax.lax.dynamic_slice_in_dim(table, i * each, each, 1)
        left = lengths - i * size
        keys, values = (paged.gathered(pool, mine, left).astype(q.dtype) for pool in pools)
        k_at = paged.token_positions(mine, left, pages, page)
        k_at = jnp.where(k_at < NOWHERE, k_at + i * size, NOWHERE)
        y, own = attention(q, keys, values, See(at, k_at), plain, lse=True)
        return merged([done, (wide(y), own)])

    shape = q.shape[:3]
    kind = sums_in(q.dtype)
    nothing = jnp.zeros((*shape, pools[1].shape[-1]), kind), jnp.full(shape, UNSEEN, kind)
    longest = jnp.max(jnp.minimum(lengths, P * page), initial=0)
    first = jnp.zeros((), jnp.int32)
    if score.window is not None:
        oldest = jnp.where(lengths > 0, jnp.min(at, 1) - score.window + 1, longest)
        first = jnp.maximum(jnp.min(oldest, initial=NOWHERE), 0) // size
    y, total = jax.lax.fori_loop(first, -(-longest // size), part, nothing)
    if score.sinks is not None:
        both = jnp.logaddexp(total, score.sinks.astype(total.dtype))
        y, total = y * jnp.exp(total - both)[..., None], both
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


BLOCKED = Implementation(blocked, lambda *_: None)
