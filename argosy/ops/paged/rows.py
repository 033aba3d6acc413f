"""Paged attention for decoding on a CPU: a few rows at a time, with all heads of a row in one product.

XLA:CPU transposes keys and values before a product for each key head. For many rows at once, these copies do not fit in the processor's
caches. Here, the queries of a row are one matrix [N, K*H] that is zero except in the columns of each query's own key head. It is
multiplied with the keys as they are stored, [S, K*H]. This takes K times the multiplications. With few query heads, these still
take less time than reading keys and values.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.attention import UNSEEN, Score, See
from argosy.ops.op import Implementation
from argosy.ops.paged import attention as paged
from argosy.ops.paged.blocked import BLOCK, attend_by_blocks, fits_one_block, with_sinks
from argosy.ops.precision import sums_in, wide

# The bytes of keys and values at a time, and the most query heads for which this was measured to be faster than `blocked` (docs/log).
TOGETHER, HEADS = 2 << 20, 32


def by_rows(
    q: Float[Array, "B 1 N H"],
    pools: paged.Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B 1"],
    score: Score,
    *,
    lse: bool = False,
) -> tuple[Array, Array] | Array:
    """Computes `paged_attention` for one query per row."""

    def some(rows: tuple[Array, ...]) -> tuple[Array, Array]:
        q, table, lengths, at = rows

        def attend(entries: dict[str, Array], see: See) -> tuple[Array, Array]:
            keys, values = paged.keys_and_values(entries[name].astype(q.dtype) for name in sorted(entries))
            return as_one_product(q, keys, values, see, score)

        named_pools = {str(i): pool for i, pool in enumerate(pools)}
        if not fits_one_block(table, pools[0].shape[1]):
            return attend_by_blocks(attend, named_pools, table, lengths, at, score)
        see = See(at, paged.token_positions(table, lengths, *pools[0].shape[:2]))
        y, total = attend({name: paged.gather_pages(pool, table, lengths) for name, pool in named_pools.items()}, see)
        return with_sinks(wide(y), total, score)

    B, operands, each = len(q), (q, table, lengths, at), rows_together(pools, table)
    if each >= B:
        y, total = some(operands)
    else:
        # Rows that pad the last group have no tokens, and a page out of range.
        rest = -B % each
        fill = (0, -1, 0, 0)
        padded = [jnp.pad(a, [(0, rest)] + [(0, 0)] * (a.ndim - 1), constant_values=n) for a, n in zip(operands, fill)]
        groups = tuple(a.reshape(-1, each, *a.shape[1:]) for a in padded)
        y, total = (a.reshape(-1, *a.shape[2:])[:B] for a in jax.lax.map(some, groups))
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


def rows_together(pools: paged.Pools, table: Int[Array, "B P"]) -> int:
    """Returns the number of rows, a power of two, whose keys and values of one block fit in TOGETHER bytes."""
    tokens = min(max(BLOCK, pools[0].shape[1]), table.shape[1] * pools[0].shape[1])
    row_bytes = 4 * tokens * sum(math.prod(pool.shape[2:]) for pool in pools)
    return 1 << max(TOGETHER // max(row_bytes, 1), 1).bit_length() - 1


def as_one_product(
    q: Float[Array, "B 1 N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K U"], see: See, score: Score
) -> tuple[Float[Array, "B 1 N U"], Float[Array, "B 1 N"]]:
    """Computes (output, log-sum-exp) of attention with one query per row, without sinks."""
    B, _, N, H = q.shape
    S, K, U = v.shape[1:]
    head_mask = jnp.eye(K, dtype=bool)[None, :, None, :, None]
    spread = jnp.where(head_mask, q.reshape(B, K, N // K, 1, H), jnp.zeros((), q.dtype)).reshape(B, N, K * H)
    s = jnp.einsum("BND,BSD->BNS", spread, k.reshape(B, S, K * H), preferred_element_type=sums_in(q.dtype)) * score.scale
    if score.cap is not None:
        s = score.cap * jnp.tanh(s / score.cap)
    s = jnp.where(see.dense(score.window), s, UNSEEN)
    most = jnp.max(s, -1, keepdims=True)
    p = jnp.exp(s - most)
    total = jnp.sum(p, -1, keepdims=True)
    every = jnp.einsum("BNS,BSD->BND", (p / total).astype(v.dtype), v.reshape(B, S, K * U)).reshape(B, K, N // K, K, U)
    # Selects, for each query head, the columns of its own key head.
    y = jnp.stack([every[:, i, :, i] for i in range(K)], 1).reshape(B, 1, N, U)
    return y, (most + jnp.log(total))[..., 0][:, None]


def _refuses(q: Any, pools: Any, table: Any, lengths: Any, score: Score, lse: bool) -> str | None:
    if q.shape[1] != 1:
        return f"{q.shape[1]} queries a row, and it computes one"
    if q.shape[2] > HEADS:
        return f"{q.shape[2]} query heads, and it is for at most {HEADS}"
    return "windows that are chunks" if score.chunked else None


ROWS = Implementation(by_rows, _refuses)
