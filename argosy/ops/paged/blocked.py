"""Paged attention in a loop over blocks of pages, which ends with the longest row.

Its cost depends on the number of tokens in the rows, not on the width of the table, and one program serves every length. The
blocks' results are merged by their log-sum-exp. Blocks before the window of every row are skipped. A quantized pool is widened one
block at a time. Forward only: JAX does not differentiate a loop whose length is not known when it is traced.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.attention import NOWHERE, UNSEEN, Score, See, attention, merge_attention
from argosy.ops.narrow import Narrow
from argosy.ops.op import Implementation
from argosy.ops.paged import attention as paged
from argosy.ops.precision import wide

# Tokens of a row that are read at a time.
BLOCK = 256


def blocked_attention(
    q: Float[Array, "B T N H"],
    pools: paged.Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> tuple[Array, Array] | Array:
    """As `paged_attention`."""
    if fits_one_block(table, pools[0].shape[1]):
        return paged.paged_reference(q, pools, table, lengths, at, score, lse=lse)
    plain = replace(score, sinks=None)

    def attend(entries: dict[str, Array], see: See) -> tuple[Array, Array]:
        keys, values = paged.keys_and_values(entries[name].astype(q.dtype) for name in sorted(entries))
        return attention(q, keys, values, see, plain, lse=True)

    y, total = attend_by_blocks(attend, {str(i): pool for i, pool in enumerate(pools)}, table, lengths, at, score)
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


def fits_one_block(table: Int[Array, "B P"], page: int) -> bool:
    """Whether one block covers the table."""
    return table.shape[1] * page <= max(BLOCK, page)


def attend_by_blocks(
    attend: Callable[[dict[str, Array], See], tuple[Array, Array]],
    pools: Mapping[str, Float[Array, "pages page *rest"] | Narrow],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B T N"]]:
    """Attention over the pages of each row, one block at a time: (y, log-sum-exp).

    Args:
        attend: attention over one block, called with {name of a pool: [B S ...]} and a `See`; returns (y, lse). It must ignore
            `score.sinks`, which are added once, after the loop.
        lengths, at: as in `paged_attention`.
    """
    pages, page = next(iter(pools.values())).shape[:2]
    each = max(1, BLOCK // page)
    size, P = each * page, table.shape[1]
    table = jnp.pad(table, ((0, 0), (0, -P % each)), constant_values=-1)

    def block(i: Array | int) -> tuple[Array, Array]:
        mine = jax.lax.dynamic_slice_in_dim(table, i * each, each, 1)
        remaining = lengths - i * size
        k_at = paged.token_positions(mine, remaining, pages, page)
        k_at = jnp.where(k_at < NOWHERE, k_at + i * size, NOWHERE)
        y, lse = attend({name: paged.gather_pages(pool, mine, remaining) for name, pool in pools.items()}, See(at, k_at))
        return wide(y), lse

    shapes = jax.eval_shape(lambda: block(0))
    nothing = jnp.zeros(shapes[0].shape, shapes[0].dtype), jnp.full(shapes[1].shape, UNSEEN, shapes[1].dtype)
    longest = jnp.max(jnp.minimum(lengths, P * page), initial=0)
    first = jnp.zeros((), jnp.int32)
    if score.window is not None:
        oldest = jnp.where(lengths > 0, jnp.min(at, 1) - score.window + 1, longest)
        first = jnp.maximum(jnp.min(oldest, initial=NOWHERE), 0) // size
    y, total = jax.lax.fori_loop(first, -(-longest // size), lambda i, done: merge_attention([done, block(i)]), nothing)
    return with_sinks(y, total, score)


def with_sinks(y: Float[Array, "B T N U"], total: Float[Array, "B T N"], score: Score) -> tuple[Array, Array]:
    """Attention without sinks as if its scores had them."""
    if score.sinks is None:
        return y, total
    both = jnp.logaddexp(total, score.sinks.astype(total.dtype))
    return y * jnp.exp(total - both)[..., None], both


BLOCKED = Implementation(blocked_attention)
