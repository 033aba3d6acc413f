"""Paged attention in a loop over blocks of pages, which ends after the last block of the longest row.

The cost depends on the number of tokens in the rows, not on the width of the page table, and one program serves every length. Results
of blocks are merged by their log-sum-exp. Blocks that are before the windows of all rows are skipped. A quantized pool is dequantized
one block at a time. There is no backward pass, since JAX does not differentiate a loop whose length is unknown during tracing.
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

# The number of tokens of a row that are read at a time.
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
    """Computes `paged_attention`."""
    if fits_one_block(table, pools[0].shape[1]):
        return paged.paged_reference(q, pools, table, lengths, at, score, lse=lse)
    plain = replace(score, sinks=None)

    def attend(entries: dict[str, Array], see: See) -> tuple[Array, Array]:
        keys, values = paged.keys_and_values(entries[name].astype(q.dtype) for name in sorted(entries))
        return attention(q, keys, values, see, plain, lse=True)

    y, total = attend_by_blocks(attend, {str(i): pool for i, pool in enumerate(pools)}, table, lengths, at, score)
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


def fits_one_block(table: Int[Array, "B P"], page: int) -> bool:
    """Whether one block covers the whole page table."""
    return table.shape[1] * page <= max(BLOCK, page)


def attend_by_blocks(
    attend: Callable[[dict[str, Array], See], tuple[Array, Array]],
    pools: Mapping[str, Float[Array, "pages page *rest"] | Narrow],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B T N"]]:
    """Computes (output, log-sum-exp) of attention over the pages of each row, one block of pages at a time.

    Args:
        attend: computes (output, log-sum-exp) over one block, from {name of a pool: entries [B S ...]} and a `See`. It must ignore
            `score.sinks`, which are applied once, after the loop.
        pools: the pools, by name.
        table, lengths, at: as in `paged_attention`.
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
    """Applies sinks to the (output, log-sum-exp) of attention without sinks."""
    if score.sinks is None:
        return y, total
    both = jnp.logaddexp(total, score.sinks.astype(total.dtype))
    return y * jnp.exp(total - both)[..., None], both


BLOCKED = Implementation(blocked_attention)
