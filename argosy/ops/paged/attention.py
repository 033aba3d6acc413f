"""Paged attention: the keys and values of each row are in pages of a pool (Kwon et al. 2023, arXiv:2309.06180).

`paged_reference` gathers the pages and then attends. It is the specification of the other implementations, such as kernels that read
pages in place.

Pools have one of two layouts: separate pools of keys [pages page K H] and of values [pages page K U], or a joined pool
[pages page 2K H] in which each key head is followed by its value head. TPU kernels read the joined pool. Its heads may be longer than
those of queries, and are then padded with zeros.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.attention import NOWHERE, Score, See, attention
from argosy.ops.narrow import Narrow
from argosy.ops.op import Implementation, Op

# (keys, values), or (joined,). Pools of keys and values may be quantized.
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
    """Computes causal attention of queries over the tokens that each row has in pages of a pool, [B T N U].

    Args:
        pools: (keys, values), or (joined,).
        table: the KV-cache pages of each row, in order. Tokens of a page out of range, including -1, are not seen.
        lengths: the number of tokens of each row in its pages, including those of these queries. Later entries may hold anything.
        at: the positions of the queries.
        lse: whether to return (output, log-sum-exp of each query's scores [B T N] in float32) instead of the output.

    Raises:
        Unsupported: the requested implementation cannot compute this.
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
    """Gathers the pages of each row, then computes dense attention."""
    keys, values = keys_and_values(gather_pages(pool, table, lengths).astype(q.dtype) for pool in pools)
    k_at = token_positions(table, lengths, *pools[0].shape[:2])
    return attention(q, keys, values, See(at, k_at), score, lse=lse)


def with_longer_heads(a: Float[Array, "*B H"], size: int) -> Float[Array, "*B size"]:
    """Pads heads with zeros to this size."""
    return jnp.pad(a, (*((0, 0),) * (a.ndim - 1), (0, size - a.shape[-1])))


def join_heads(keys: Float[Array, "*B K H"], values: Float[Array, "*B K H"]) -> Float[Array, "*B 2*K H"]:
    """Interleaves keys and values along the axis of heads, as a joined pool stores them."""
    return jnp.stack([keys, values], -2).reshape(*keys.shape[:-2], -1, keys.shape[-1])


def keys_and_values(pools: Iterable[Array]) -> tuple[Array, Array]:
    """Returns the keys and the values of pools in either layout, or of arrays gathered from such pools."""
    first, *rest = pools
    return (first, rest[0]) if rest else (first[..., 0::2, :], first[..., 1::2, :])


def gather_pages(pool: Float[Array, "pages page *rest"] | Narrow, table: Int[Array, "B P"], lengths: Int[Array, "B"]) -> Array:
    """Gathers the entries of each row's tokens in order, [B P*page *rest]. The entries of a quantized pool are dequantized to float32.

    Entries without a token are set to zero, since a recycled page may hold NaN, and zero times NaN is NaN.
    """
    pages, page = pool.shape[:2]
    tokens = jax.tree.map(lambda a: a[jnp.clip(table, 0, pages - 1)].reshape(len(table), -1, *a.shape[2:]), pool)
    tokens = tokens.widened() if isinstance(tokens, Narrow) else tokens
    owned = token_positions(table, lengths, pages, page) < NOWHERE
    return jnp.where(owned.reshape(*owned.shape, *(1,) * (tokens.ndim - 2)), tokens, jnp.zeros((), tokens.dtype))


def token_positions(table: Int[Array, "B P"], lengths: Int[Array, "B"], pages: int, page: int) -> Int[Array, "B S"]:
    """Returns the position of each entry in the pages of a row. Entries that are not a token of the row get `NOWHERE`."""
    at = jnp.arange(table.shape[1] * page, dtype=jnp.int32)
    valid = jnp.repeat((table >= 0) & (table < pages), page, axis=1, total_repeat_length=len(at))
    return jnp.where(valid & (at < lengths[:, None]), at, NOWHERE)


# What to try first on each platform. `blocked` reads only pages in use, and equals `paged_reference` for tables of one block. `rows`
# does the same for decoding rows, faster on a CPU. `native` is faster still, if its library is loaded (`ops.native.library`).
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
