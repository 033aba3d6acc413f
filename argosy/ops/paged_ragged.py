"""Paged attention on TPUs: the ragged kernel of JAX, which reads joined pools in place (arXiv:2604.15464).

It takes tokens flat, each row's queries as the last tokens of the row. A row here has as many queries as every other, padding at its
end: so the kernel is told of a row that is longer by its padding. Queries that are real see nothing of it, because attention is
causal, and the results of padding have no meaning anyway.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.attention import Implementation, Score
from argosy.ops.paged_attention import Pools
from argosy.parallel.scope import platform

BUFFERS = 4 << 20


def ragged(
    q: Float[Array, "B T N H"],
    pools: Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Array:
    """As `paged_attention`."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    blocks = _blocks(pools[0], q.shape[0] * q.shape[1], table.shape[1])
    return _call(partial(ragged_paged_attention, **blocks), q, pools[0], table, lengths, at, score)


def _call(
    kernel: Any, q: Array, pool: Array, table: Int[Array, "B P"], lengths: Int[Array, "B"], at: Int[Array, "B T"], score: Score
) -> Array:
    B, T, N, H = q.shape
    live = lengths > 0
    # A row without tokens is not read; the kernel takes the first `rows` of them.
    rows = jnp.max(jnp.where(live, jnp.arange(1, B + 1, dtype=jnp.int32), 0), keepdims=True)
    y = kernel(
        q.reshape(B * T, N, H).astype(pool.dtype),
        pool,
        jnp.where(live, at[:, 0] + T, T).astype(jnp.int32),
        jnp.clip(table, 0, len(pool) - 1),
        jnp.arange(B + 1, dtype=jnp.int32) * T,
        rows,
        sm_scale=score.scale,
        sliding_window=score.window,
        soft_cap=score.cap,
    )
    return y.reshape(B, T, N, H).astype(q.dtype)


def _blocks(pool: Array, tokens: int, pages: int) -> dict[str, int]:
    """Sizes of the kernel's blocks. On a TPU it looks them up in a table of measurements; a program that is compiled for one elsewhere
    gets two buffers of pages of `BUFFERS` bytes."""
    if jax.default_backend() == "tpu":
        return {}
    one = pool[0].size * pool.dtype.itemsize
    return {"num_kv_pages_per_block": max(1, min(pages, BUFFERS // (2 * one))), "num_queries_per_block": min(tokens, 32)}


def cannot_hold(heads: int, size: int, dtype: Any) -> str | None:
    """Why the kernel cannot read a joined pool of so many key heads of this size; None if it can."""
    if size % 128:
        return f"heads of {size}, not a multiple of 128"
    packing = 4 // jnp.dtype(dtype).itemsize
    if packing not in (1, 2):
        return f"a cache of {jnp.dtype(dtype).name}"
    tiles = 2 * heads / packing
    return None if tiles in (1, 2, 4, 8) or tiles % 8 == 0 else f"{heads} key heads, which no tile holds"


def _refuses(q: Array, pools: Pools, table: Array, lengths: Any, score: Score, lse: bool) -> str | None:
    if platform() != "tpu":
        return "is for TPUs"
    if len(pools) != 1:
        return "reads joined pools"
    if lse:
        return "gives no log-sum-exp"
    if score.sinks is not None or score.chunked:
        return "has neither sinks nor chunks"
    return cannot_hold(pools[0].shape[2] // 2, q.shape[-1], pools[0].dtype)


RAGGED = Implementation(ragged, _refuses)
