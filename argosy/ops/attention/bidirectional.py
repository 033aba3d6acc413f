"""Bidirectional and cross-attention for CPUs: a loop over blocks of queries, each against all keys, with its own backward pass.

The scores of an iteration stay in the processor's caches, and no scores are kept. The backward pass computes them again from each
query's largest score and sum (arXiv:2205.14135). The gradients of keys and values are computed transposed, with the head size before
the tokens: XLA:CPU's matrix product is ten times slower if the summed axis is the second last of its left side. On two cores of an
AVX-512 server, 2 x 1,024 tokens with 4 heads of 16 take 13 ms of CPU time instead of 97, and 40 ms instead of 278 with gradients.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.process.cores import core_count
from argosy.ops.attention import UNSEEN, Score, See, of_segments
from argosy.ops.precision import sums_in, wide
from argosy.parallel.scope import on_several_devices

# The bytes of scores for each core in one iteration, about the size of a level-2 cache. A machine with another number of cores
# therefore has another program, whose results differ by rounding. Four times as many bytes take a quarter more CPU time at 4,096
# tokens.
SCORES = 1 << 20

# The segments of the blocks of queries, the segments that are their prefixes, and the segments of the keys.
Segments = tuple[Int[Array, "n B rows"] | None, Int[Array, "n B rows"] | None, Int[Array, "B S"] | None]


def bidirectional(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K U"], see: See, score: Score, block: int
) -> Float[Array, "B T N U"]:
    """Computes `attention` for a `See` that is not causal and has no picked keys. Differentiable in reverse mode.

    Args:
        block: the most queries of an iteration.
    """
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    n = -(-T // block)
    rows = -(-T // n)
    queries = _blocks((q * score.scale).astype(q.dtype), n, rows, K)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    segments = (None, None, None)
    if see.q_segment is not None and see.k_segment is not None:
        split = partial(_rows, n=n, rows=rows)
        segments = (split(see.q_segment), None if see.q_prefix is None else split(see.q_prefix), see.k_segment)
    groups = _head_groups(B, K, N // K * rows * S * 4)
    if groups == 1:
        return _unblocks(_attend(queries, keys, values, segments, score.window, rows), T, N)
    heads = _grouped(queries, groups, 2), _grouped(keys, groups, 1), _grouped(values, groups, 1)
    out = jax.lax.map(lambda heads: _attend(*heads, segments, score.window, rows), heads)
    return _unblocks(jnp.moveaxis(out, 0, 2).reshape(n, B, K, -1, v.shape[-1]), T, N)


def _head_groups(B: Any, K: int, bytes_of_a_head: int) -> int:
    """Returns the number of groups of key heads that are computed one after the other. With several devices this is 1, because XLA
    already splits the heads over devices."""
    if on_several_devices() or not isinstance(B, int):
        return 1
    most = max(1, core_count() * SCORES // (B * bytes_of_a_head))
    return next(groups for groups in range(1, K + 1) if K % groups == 0 and K // groups <= most)


def _grouped(a: Array, groups: int, axis: int) -> Array:
    return jnp.moveaxis(a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :]), axis, 0)


def _rows(ids: Int[Array, "B T"], n: int, rows: int) -> Int[Array, "n B rows"]:
    """Cuts the segments of queries into n blocks. The padding of the last block has segment 0, and its results are not read."""
    return jnp.pad(ids, ((0, 0), (0, n * rows - ids.shape[1]))).reshape(-1, n, rows).transpose(1, 0, 2)


def _blocks(x: Float[Array, "B T N H"], n: int, rows: int, K: int) -> Float[Array, "n B K rows_of_group H"]:
    """Cuts queries (or outputs, or their gradients) into n blocks, with the query heads of a key head stacked along the rows."""
    B, T, N, H = x.shape
    x = jnp.pad(x, ((0, 0), (0, n * rows - T), (0, 0), (0, 0))).reshape(B, n, rows, K, N // K, H)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(n, B, K, N // K * rows, H)


def _unblocks(x: Float[Array, "n B K rows_of_group H"], T: int, N: int) -> Float[Array, "B T N H"]:
    n, B, K, _, H = x.shape
    return x.reshape(n, B, K, N // K, -1, H).transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, H)[:, :T]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Multiplies, batched over B and K, contracting one axis of each. Sums in float32 at least."""
    axes = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=sums_in(a.dtype))


def _scores(queries: Array, keys: Array, ids: tuple[Any, ...], theirs: Any, window: int | None, rows: int) -> Array:
    """Computes the scores of one block, [B K rows_of_group S], with `UNSEEN` for keys that a query does not see.

    Args:
        ids: the index of the block, and the segments and prefixes of the block's queries.
        theirs: the segments of the keys.
    """
    s = _dot(queries, keys, (3, 3))
    number, mine, prefix = ids
    see = None if mine is None else of_segments(mine, theirs, prefix)
    if window is not None:
        ahead = (number * rows + jnp.arange(rows))[:, None] - jnp.arange(s.shape[3])
        near = (jnp.abs(ahead) < window)[None]
        see = near if see is None else see & near
    if see is None:
        return s
    B, K, _, S = s.shape
    return jnp.where(see[:, None, None], s.reshape(B, K, -1, rows, S), UNSEEN).reshape(s.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(queries: Array, keys: Array, values: Array, segments: Segments, window: int | None, rows: int) -> Array:
    return _forward(queries, keys, values, segments, window, rows)[0]


def _numbered(queries: Array, segments: Segments) -> tuple[Any, ...]:
    return jnp.arange(len(queries)), *segments[:2]


def _forward(queries: Array, keys: Array, values: Array, segments: Segments, window: int | None, rows: int) -> Any:
    def of_block(block: Any) -> tuple[Array, Array, Array]:
        part, ids = block
        s = _scores(part, keys, ids, segments[2], window, rows)
        most = jnp.max(s, -1, keepdims=True)
        p = jnp.exp(s - most)
        z = 1 / jnp.sum(p, -1, keepdims=True)
        return (_dot(p.astype(values.dtype), values, (3, 2)) * z).astype(values.dtype), most, z

    out, most, z = jax.lax.map(of_block, (queries, _numbered(queries, segments)))
    return out, (queries, keys, values, segments, out, most, z)


def _backward(window: int | None, rows: int, residuals: Any, g: Array) -> Any:
    queries, keys, values, segments, out, most, z = residuals

    go = (wide(g) * z).astype(g.dtype)
    inner = jnp.sum(wide(go) * wide(out), -1, keepdims=True)
    # Transposed outside of the loop. Inside, XLA would fold the transpose into the product, which is slow (see the top of this file).
    across = queries.swapaxes(3, 4), go.swapaxes(3, 4)

    def of_block(sums: tuple[Array, Array], block: Any) -> tuple[tuple[Array, Array], Array]:
        part, ids, most, go, inner, (part_across, go_across) = block
        p = jnp.exp(_scores(part, keys, ids, segments[2], window, rows) - most)
        ds = (p * (_dot(go, values, (3, 3)) - inner)).astype(g.dtype)
        dk = sums[0] + _dot(part_across, ds, (3, 2))
        dv = sums[1] + _dot(go_across, p.astype(g.dtype), (3, 2))
        return (dk, dv), _dot(ds, keys, (3, 2)).astype(g.dtype)

    zeros = _zeros_across(keys), _zeros_across(values)
    (dk, dv), dq = jax.lax.scan(of_block, zeros, (queries, _numbered(queries, segments), most, go, inner, across))
    no_gradient = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), segments)
    return dq, dk.swapaxes(2, 3).astype(g.dtype), dv.swapaxes(2, 3).astype(g.dtype), no_gradient


def _zeros_across(a: Float[Array, "B K S H"]) -> Float[Array, "B K H S"]:
    return jnp.zeros_like(a.swapaxes(2, 3), sums_in(a.dtype))


_attend.defvjp(_forward, _backward)
