"""Paged attention on a CPU that reads pages in place, with any number of queries per row.

A query's result does not depend on the other queries of the call. A prompt that is computed in chunks, or together with other rows,
gives bit-identical results.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.ops.attention import Score
from argosy.ops.narrow import Narrow
from argosy.ops.native import library
from argosy.ops.op import Implementation
from argosy.ops.paged.attention import Pools


def attend(
    q: Float[Array, "B T N H"],
    pools: Pools,
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> tuple[Array, Array] | Array:
    """Computes `paged_attention`."""
    keys, values = pools
    sinks = jnp.zeros(0, jnp.float32) if score.sinks is None else score.sinks.astype(jnp.float32)
    shapes = [(*q.shape[:3], values.shape[-1]), q.shape[:3]]
    call = jax.ffi.ffi_call("argosy_paged_attention", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    operands = (q.astype(jnp.float32), keys, values, *(a.astype(jnp.int32) for a in (table, lengths, at)), sinks)
    attributes = {"scale": np.float32(score.scale), "cap": np.float32(score.cap or 0), "window": np.int64(score.window or 0)}
    y, total = call(*operands, **attributes)
    return (y.astype(q.dtype), total) if lse else y.astype(q.dtype)


def _refuses(q: Any, pools: Any, table: Any, lengths: Any, score: Score, lse: bool) -> str | None:
    if reason := library.unavailable():
        return reason
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries in {q.dtype}"
    if len(pools) != 2 or any(isinstance(pool, Narrow) for pool in pools):
        return "joined or quantized pools"
    if any(pool.dtype not in (jnp.float32, jnp.bfloat16) for pool in pools) or pools[0].dtype != pools[1].dtype:
        return f"pools of {pools[0].dtype} and {pools[1].dtype}"
    return "windows that are chunks" if score.chunked else None


NATIVE = Implementation(attend, _refuses)
