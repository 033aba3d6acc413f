"""Attention over pages: each row's keys and values are scattered over a pool (Kwon et al. 2023, arXiv:2309.06180).

`paged_reference` gathers the pages and then attends; it is the specification. Kernels that read pages in place register beside it.

Pools come in two layouts: one of keys [pages page K H] and one of values [pages page K U], or a joined one [pages page 2K H] in
which each key head is followed by its value head. TPU kernels read the joined one, whose heads may be longer than the queries': the
rest of each is zero.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.attention import NOWHERE, Score, See, attention
from argosy.ops.narrow import Narrow
from argosy.ops.op import Implementation, Op

# (keys, values), or (joined,); those that are not joined may be quantized.
Pools = tuple[Float[Array, "pages page _ _"] | Narrow, ...]


def paged_attention(
    q: Float[Array, "B T N H"],
    pools: Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """Causal attention of queries at positions `at` over the tokens that each row has in a pool of pages: [B T N U].

    Args:
        pools: of keys and of values, or joined.
        table: the pages of each row, in order. A page out of range, including -1, belongs to no row: its tokens are not seen.
        lengths: the number of tokens of each row in its pages, including these queries' own. What follows may be anything.
        lse: also returns the log-sum-exp of each query, [B T N] float32.

    Raises:
        Unsupported: the named implementation cannot do this.
    """
    size = q.shape[-1]
    if len(pools) == 1:
        q = with_longer_heads(q, pools[0].shape[-1])
    out = PAGED_ATTENTION.choose(q, pools, table, lengths, score, lse).run(q, pools, table, lengths, at, score, lse=lse)
    if q.shape[-1] == size:
        return out
    return (out[0][..., :size], out[1]) if lse else out[..., :size]


def paged_reference(
    q: Array,
    pools: Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """Gathers the pages of each row, then computes plain attention."""
    keys, values = keys_and_values(gather_pages(pool, table, lengths).astype(q.dtype) for pool in pools)
    k_at = token_positions(table, lengths, *pools[0].shape[:2])
    return attention(q, keys, values, See(at, k_at), score, lse=lse)


def with_longer_heads(a: Float[Array, "*B H"], size: int) -> Float[Array, "*B size"]:
    """Heads filled up with zeros."""
    return jnp.pad(a, (*((0, 0),) * (a.ndim - 1), (0, size - a.shape[-1])))


def join_heads(keys: Float[Array, "*B K H"], values: Float[Array, "*B K H"]) -> Float[Array, "*B 2*K H"]:
    """Keys and values concatenated along the axis of heads, as a joined pool stores them."""
    return jnp.stack([keys, values], -2).reshape(*keys.shape[:-2], -1, keys.shape[-1])


def keys_and_values(pools: Iterable[Array]) -> tuple[Array, Array]:
    """Keys and values of pools in either layout, or of what was gathered from them."""
    first, *rest = pools
    return (first, rest[0]) if rest else (first[..., 0::2, :], first[..., 1::2, :])


def gather_pages(pool: Float[Array, "pages page *rest"] | Narrow, table: Int[Array, "B P"], lengths: Int[Array, "B"]) -> Array:
    """The tokens of each row in order, [B P*page *rest]; of a quantized pool in float32. Other entries are zero: a recycled page may
    contain NaN, and zero times NaN is NaN."""
    pages, page = pool.shape[:2]
    tokens = jax.tree.map(lambda a: a[jnp.clip(table, 0, pages - 1)].reshape(len(table), -1, *a.shape[2:]), pool)
    tokens = tokens.widened() if isinstance(tokens, Narrow) else tokens
    owned = token_positions(table, lengths, pages, page) < NOWHERE
    return jnp.where(owned.reshape(*owned.shape, *(1,) * (tokens.ndim - 2)), tokens, jnp.zeros((), tokens.dtype))


def token_positions(table: Int[Array, "B P"], lengths: Int[Array, "B"], pages: int, page: int) -> Int[Array, "B S"]:
    """The position of each token in the pages of a row; `NOWHERE` for entries that are not the row's."""
    at = jnp.arange(table.shape[1] * page, dtype=jnp.int32)
    valid = jnp.repeat((table >= 0) & (table < pages), page, axis=1, total_repeat_length=len(at))
    return jnp.where(valid & (at < lengths[:, None]), at, NOWHERE)


# What to try first on each platform. `blocked` reads only the pages in use, and is `paged_reference` for tables of one block; `rows`
# does so for decoding rows, faster on a CPU; `native` is faster still, where its library is loaded (`ops.native.library`).
PAGED_ATTENTION = Op(
    "paged_attention",
    "paged attention",
    prefer={"cpu": ("native", "rows", "blocked"), "gpu": ("triton", "blocked"), "tpu": ("ragged", "blocked")},
)
PAGED_ATTENTION.add("reference", Implementation(paged_reference))
PAGED_ATTENTION.add("blocked", "argosy.ops.paged.blocked:BLOCKED")
PAGED_ATTENTION.add("rows", "argosy.ops.paged.rows:ROWS")
PAGED_ATTENTION.add("native", "argosy.ops.native.paged:NATIVE")
PAGED_ATTENTION.add("triton", "argosy.ops.paged.triton:TRITON")
PAGED_ATTENTION.add("ragged", "argosy.ops.paged.ragged:RAGGED")
