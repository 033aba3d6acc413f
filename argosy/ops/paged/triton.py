"""Paged attention on NVIDIA GPUs: a Pallas kernel, compiled by Triton, that reads pages in place (Dao et al. 2023, flash decoding).

One program instance of the kernel computes the queries of one row that share a key head, over a share of the row's tokens. A few long
rows therefore also fill a GPU. An instance reads blocks of tokens through the page table. Blocks before the window or after the end of
the row are not read. Shares are merged by their log-sum-exp, as in `blocked`, and so are sinks. Tokens that are not the row's are never
multiplied, since a recycled page may hold NaN.

The kernel is for decoding and short chunks. Longer chunks are left to `blocked`. Tests run the kernel in interpret mode. It was timed
on an H200 (docs/guides/gpus.md).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.ops.attention import UNSEEN, Score
from argosy.ops.narrow import Narrow
from argosy.ops.op import Implementation
from argosy.ops.paged.attention import Pools
from argosy.ops.paged.blocked import with_sinks
from argosy.parallel.scope import activation_spec, axes_in, on_several_devices, platform

# The number of tokens that an instance reads at a time, and in all; the most queries of an instance; and the least rows and head size
# that a tensor core takes.
BLOCK, SHARE, QUERIES, LEAST = 64, 512, 64, 16


def triton(
    q: Float[Array, "B T N H"],
    pools: Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
    interpret: bool = False,
) -> Any:
    """Computes `paged_attention`.

    Args:
        interpret: whether to run the kernel in interpret mode, for tests.
    """
    call = partial(_call, score=score, interpret=interpret)
    if on_several_devices():
        # XLA cannot split a kernel, so each device computes its own heads.
        heads, whole = PartitionSpec(None, None, *_split(pools[0]), None), PartitionSpec()
        in_specs = (heads, (heads, heads), whole, whole, whole)
        out = (heads, PartitionSpec(None, None, *_split(pools[0])))
        call = jax.shard_map(call, in_specs=in_specs, out_specs=out, check_vma=False)
    y, total = call(q, pools, table, lengths, at)
    y, total = with_sinks(y, total, score)
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


def _split(pool: Any) -> PartitionSpec:
    """Returns how the key heads of a pool are split over devices."""
    return activation_spec("K", (pool.shape[2],))


def _call(
    q: Array, pools: Any, table: Array, lengths: Array, at: Array, *, score: Score, interpret: bool
) -> tuple[Array, Array]:
    """Computes (output, log-sum-exp) of attention without sinks, both in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    (B, T, N, H), (pages, page, K, U) = q.shape, pools[1].shape
    G, each = N // K, max(1, BLOCK // page)
    R = max(LEAST, 1 << (T * G - 1).bit_length())
    shares = -(-table.shape[1] * page // SHARE)
    table = jnp.pad(table, ((0, 0), (0, shares * SHARE // page - table.shape[1])), constant_values=-1)
    # Queries that share a key head are the rows of one matrix. Rows that are padding see nothing.
    rows = q.astype(pools[0].dtype).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, R - T * G), (0, 0)))
    places = jnp.pad(jnp.repeat(at, G, axis=1, total_repeat_length=T * G), ((0, 0), (0, R - T * G)), constant_values=-1)
    first = jnp.zeros_like(lengths)
    if score.window is not None:
        first = jnp.clip(jnp.min(at, 1) - score.window + 1, 0)
    kernel = partial(_kernel, score=score, pages=pages, each=each)
    y, total = pl.pallas_call(
        kernel,
        grid=(B, K, shares),
        in_specs=[
            pl.BlockSpec((None, None, R, H), lambda b, k, s: (b, k, 0, 0)),
            pl.BlockSpec((None, R), lambda b, k, s: (b, 0)),
            pl.BlockSpec((None, SHARE // page), lambda b, k, s: (b, s)),
            pl.BlockSpec((None,), lambda b, k, s: (b,)),
            pl.BlockSpec((None,), lambda b, k, s: (b,)),
            pl.BlockSpec((pages, page, None, H), lambda b, k, s: (0, 0, k, 0)),
            pl.BlockSpec((pages, page, None, U), lambda b, k, s: (0, 0, k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, R, U), lambda b, k, s: (s, b, k, 0, 0)),
            pl.BlockSpec((None, None, None, R), lambda b, k, s: (s, b, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((shares, B, K, R, U), jnp.float32),
            jax.ShapeDtypeStruct((shares, B, K, R), jnp.float32),
        ],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        name="paged_attention",
    )(rows, places, table, lengths, first, *pools)
    whole = jax.nn.logsumexp(total, 0)
    y = jnp.sum(y * jnp.exp(total - whole)[..., None], 0)
    y, whole = y[:, :, : T * G], whole[:, :, : T * G]
    y = y.reshape(B, K, T, G, U).transpose(0, 2, 1, 3, 4).reshape(B, T, N, U)
    return y, whole.reshape(B, K, T, G).transpose(0, 2, 1, 3).reshape(B, T, N)


def _kernel(
    q_ref: Any, at_ref: Any, table_ref: Any, length_ref: Any, first_ref: Any, k_ref: Any, v_ref: Any, y_ref: Any, total_ref: Any,
    *, score: Score, pages: int, each: int,
) -> None:  # fmt: skip
    """The kernel: computes attention of the queries of one key head over one share of a row's tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    (R, H), (page, U) = q_ref.shape, v_ref.shape[-2:]
    size = each * page
    begin = pl.program_id(2) * SHARE
    q, at, length = q_ref[...], at_ref[...], length_ref[...]
    lowest = jnp.maximum(begin, first_ref[...]) // size
    highest = -(-jnp.minimum(begin + SHARE, length) // size)

    def block(i: Any, done: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, most, weight = done
        i = lowest + i
        ids = table_ref[pl.ds(i * each - begin // page, each)]
        token = i * size + jnp.arange(size, dtype=jnp.int32)
        valid = jnp.broadcast_to(((ids >= 0) & (ids < pages))[:, None], (each, page)).reshape(size) & (token < length)
        ids = jnp.clip(ids, 0, pages - 1)
        k = jnp.where(valid[:, None], k_ref[ids].reshape(size, H), jnp.zeros((), k_ref.dtype))
        v = jnp.where(valid[:, None], v_ref[ids].reshape(size, U), jnp.zeros((), v_ref.dtype))
        s = plt.dot(q, k.T, precision=jax.lax.Precision.HIGHEST) * score.scale
        if score.cap is not None:
            s = score.cap * jnp.tanh(s / score.cap)
        ahead = at[:, None] - token[None, :]
        seen = valid[None, :] & (ahead >= 0)
        if score.window is not None:
            seen &= ahead < score.window
        s = jnp.where(seen, s, UNSEEN)
        now = jnp.maximum(most, jnp.max(s, 1))
        shrink, p = jnp.exp(most - now), jnp.where(seen, jnp.exp(s - now[:, None]), 0.0)
        product = plt.dot(p.astype(v.dtype), v, precision=jax.lax.Precision.HIGHEST)
        return y * shrink[:, None] + product, now, weight * shrink + jnp.sum(p, 1)

    nothing = jnp.zeros((R, U), jnp.float32), jnp.full(R, UNSEEN, jnp.float32), jnp.zeros(R, jnp.float32)
    y, most, weight = jax.lax.fori_loop(0, jnp.maximum(highest - lowest, 0), block, nothing)
    some = weight > 0
    y_ref[...] = y / jnp.where(some, weight, 1.0)[:, None]
    total_ref[...] = jnp.where(some, most + jnp.log(jnp.where(some, weight, 1.0)), UNSEEN)


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def _refuses(q: Array, pools: Pools, table: Array, lengths: Any, score: Score, lse: bool) -> str | None:
    if platform() != "gpu":
        return "is for NVIDIA GPUs"
    return triton_refusal(q, pools, score)


def triton_refusal(q: Array, pools: Pools, score: Score) -> str | None:
    """Returns why the kernel cannot compute this. None: it can."""
    if score.chunked:
        return "has no windows that are chunks"
    if len(pools) != 2:
        return "reads keys and values in pools of their own"
    keys, values = pools
    if isinstance(keys, Narrow) or isinstance(values, Narrow):
        return "reads no scales of a quantized cache"
    (_, T, N, H), (_, page, K, U) = q.shape, values.shape
    if on_several_devices() and not axes_in(_split(pools[0])):
        return "needs key heads that the devices share"
    if T * (N // K) > QUERIES:
        return f"{T * (N // K)} queries for each key head, of {QUERIES} at most"
    if not (_is_power(H) and _is_power(U) and min(H, U) >= LEAST):
        return f"heads of {H} and {U}, not powers of 2 of {LEAST} or more"
    if not _is_power(page) or page > BLOCK:
        return f"pages of {page} tokens, not a power of 2 up to {BLOCK}"
    if keys.dtype not in (jnp.bfloat16, jnp.float16):
        return f"a cache of {keys.dtype.name}: eight times slower than `reference` in float32"
    return None


TRITON = Implementation(triton, _refuses)
