"""Paged attention on TPUs: the ragged kernel of JAX, which reads joined pools in place (arXiv:2604.15464).

The kernel takes flat queries, which are the last tokens of their rows, and reads the pages of rows that have queries. Rows without new
tokens are therefore moved behind the others, and padding queries are left out. If a row counted its padding, the kernel would read what
a previous owner left in the row's pages, and one NaN there would reach every query.

Unlike the reference, the kernel gives no meaningful result for a row with a page out of range within its length. The engine makes no
such row.

The kernel takes one scale for all keys and one for all values. A quantized cache has a scale for each token and head, so `blocked` is
used for it.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.ops.attention import Score
from argosy.ops.narrow import Narrow
from argosy.ops.op import Implementation
from argosy.ops.paged.attention import PAGED_ATTENTION, Pools
from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, device_kind, on_several_devices, platform

# The numbers in a row of a tile. Shorter heads are padded with zeros. XLA would store them with padding in any case, or would put the
# axis of pages last and copy the pool twice in every step.
LANES = 128
# The bytes of the kernel's two buffers of pages, out of 16 MB of fast memory that it may take by default.
BUFFERS = 4 << 20
OLD = ("TPU v2", "TPU v3")


def ragged_attention(
    q: Float[Array, "B T N H"],
    pools: tuple[Float[Array, "pages page _ H"]],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Array:
    """Computes `paged_attention`."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    blocks = _blocks(pools[0], q.shape[0] * q.shape[1], table.shape[1])
    call = partial(_call, partial(ragged_paged_attention, **blocks), score=score)
    if on_several_devices():
        # XLA cannot split a kernel, so each device computes its own heads.
        heads = PartitionSpec(None, None, *_split(pools[0]), None)
        whole = PartitionSpec()
        call = jax.shard_map(call, in_specs=(heads, heads, whole, whole, whole), out_specs=heads, check_vma=False)
    return call(q, pools[0], table, lengths, at)


def _split(pool: Array) -> PartitionSpec:
    """Returns how the key heads of a joined pool are split over devices."""
    return activation_spec("K", (pool.shape[2] // 2,))


def _call(
    kernel: Any, q: Array, pool: Array, table: Int[Array, "B P"], lengths: Int[Array, "B"], at: Int[Array, "B T"], score: Score
) -> Array:
    B, T, N, H = q.shape
    pages, page = pool.shape[:2]
    first = jnp.arange(table.shape[1], dtype=jnp.int32) * page
    whole = jnp.all((first >= lengths[:, None]) | ((table >= 0) & (table < pages)), 1)
    new = jnp.where(whole, jnp.clip(lengths - at[:, 0], 0, T), 0)
    order = jnp.argsort(new == 0, stable=True)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new[order], dtype=jnp.int32)])
    # The index of each query in the flat queries. Padding gets an index past the end.
    row_starts = jnp.zeros(B, jnp.int32).at[order].set(starts[:-1])
    t = jnp.arange(T, dtype=jnp.int32)
    places = jnp.where(t < new[:, None], row_starts[:, None] + t, B * T).reshape(-1)
    flat = jnp.zeros((B * T, N, H), pool.dtype).at[places].set(q.reshape(B * T, N, H).astype(pool.dtype), mode="drop")
    y = kernel(
        flat,
        pool,
        lengths[order],
        jnp.clip(table[order], 0, pages - 1),
        starts,
        jnp.sum(new > 0, keepdims=True, dtype=jnp.int32),
        sm_scale=score.scale,
        sliding_window=score.window,
        soft_cap=score.cap,
    )
    return jnp.take(y, places, 0, mode="clip").reshape(B, T, N, H).astype(q.dtype)


def _blocks(pool: Array, tokens: int, pages: int) -> dict[str, int]:
    """Returns the kernel's block sizes. On a TPU, there are none, since the kernel looks them up in a table of measurements. A program
    that is compiled for a TPU elsewhere gets buffers of `BUFFERS` bytes."""
    if jax.default_backend() == "tpu":
        return {}
    page_bytes = pool[0].size * pool.dtype.itemsize
    return {"num_kv_pages_per_block": max(1, min(pages, BUFFERS // (2 * page_bytes))), "num_queries_per_block": min(tokens, 32)}


def ragged_refusal(heads: int, size: int, dtype: Any) -> str | None:
    """Returns why the kernel cannot read a joined pool with this number of key heads and this head size. None: it can."""
    if size != LANES:
        # Mosaic does not compile the kernel for heads of 256.
        return f"heads of {size}, not {LANES}"
    packing = 4 // jnp.dtype(dtype).itemsize
    if packing not in (1, 2):
        return f"a cache of {jnp.dtype(dtype).name}"
    tiles = 2 * heads / packing
    return None if tiles in (1, 2, 4, 8) or tiles % 8 == 0 else f"{heads} key heads, which no tile holds"


def joined_size(heads: int, size: int, dtype: Any) -> int | None:
    """Returns the head size of joined pools. None: layers on this platform should not use joined pools."""
    if (PAGED_ATTENTION.requested or PAGED_ATTENTION.preferred[0]) != "ragged":
        return None
    filled = -(-size // LANES) * LANES
    return filled if ragged_refusal(heads, filled, dtype) is None else None


def _refuses(q: Array, pools: Pools, table: Array, lengths: Any, score: Score, lse: bool) -> str | None:
    pool = pools[0]
    if isinstance(pool, Narrow):
        return "reads no scales of a quantized cache"
    if platform() != "tpu":
        return "is for TPUs"
    if device_kind() in OLD:
        return "is for TPU v4 and later"
    if len(pools) != 1:
        return "reads joined pools"
    if lse:
        return "gives no log-sum-exp"
    if on_several_devices() and not axes_in(_split(pool)):
        return "needs key heads that the devices share"
    if score.sinks is not None or score.chunked:
        return "has neither sinks nor chunks"
    return ragged_refusal(pool.shape[2] // 2 // _shares(pool), pool.shape[-1], pool.dtype)


def _shares(pool: Array) -> int:
    """Returns the number of devices over which the key heads of a joined pool are split."""
    sizes = axis_sizes()
    return math.prod(sizes[axis] for axis in axes_in(_split(pool)))


RAGGED = Implementation(ragged_attention, _refuses)
