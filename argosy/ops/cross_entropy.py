"""Cross-entropy of the next token. The logits [rows V] are the largest array of a training step.

    from_logits         the specification
    vocabulary_blocks   fuses head and loss, a block of the vocabulary at a time. The forward pass keeps what the backward pass
                        needs, so the softmax is computed once. For CPUs, and for heads that are plain weights
    row_chunks          any head, some rows at a time. The backward pass recomputes logits. For when memory is short

Each returns, for every row, the loss and the log of the partition function, for the z-loss (de Brebisson and Vincent 2016).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.ops.matmul import matmul
from argosy.ops.precision import sums_in, wide

Losses = tuple[Float[Array, "R"], Float[Array, "R"]]
BLOCKS = 8


def from_logits(logits: Float[Array, "*R V"], targets: Int[Array, "*R"]) -> tuple[Float[Array, "*R"], Float[Array, "*R"]]:
    """Computes -log p(target) and log sum exp(logits), in float32 at least."""
    logits = wide(logits)
    lse = jax.nn.logsumexp(logits, -1)
    return lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0], lse


def row_chunks(
    head: Callable[[Float[Array, "R D"]], Float[Array, "R V"]],
    x: Float[Array, "R D"],
    targets: Int[Array, "R"],
    rows: int,
) -> Losses:
    """Computes the losses of rows x with a head. At most `rows` rows of logits are in memory at once."""
    return by_chunks(lambda x, targets: from_logits(head(x), targets), rows, x, targets)


def by_chunks(of: Callable[..., Any], rows: int, *arrays: Array) -> Any:
    """Applies a function to arrays [R ...], at most `rows` rows at a time. The backward pass computes each chunk again.

    A chunk takes every n-th row, so that each device has a share of every chunk.

    Args:
        of: a function of arrays [rows ...] that returns a pytree of arrays [rows ...].
    """
    count = len(arrays[0])
    n = -(-count // rows)

    def split(a: Array) -> Array:
        padded = jnp.pad(a, ((0, n * rows - count), *[(0, 0)] * (a.ndim - 1)))
        return padded.reshape(rows, n, *a.shape[1:]).swapaxes(0, 1)

    def joined(a: Array) -> Array:
        return a.swapaxes(0, 1).reshape(n * rows, *a.shape[2:])[:count]

    part = jax.checkpoint(lambda each: of(*each))
    return jax.tree.map(joined, jax.lax.map(part, tuple(map(split, arrays))))


def by_times(of: Callable[..., Any], rows: int, *arrays: Array) -> Any:
    """Does the same as `by_chunks` for arrays [B T ...] whose time axis is split over devices, in chunks of about `rows` rows.

    A chunk takes every n-th time, so that each device has a share of every chunk.
    """
    B, T = arrays[0].shape[:2]
    n = next(n for n in range(max(1, -(-B * T // rows)), T + 1) if T % n == 0)

    def cut(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(B, T // n, n, *a.shape[2:]), 2, 0)

    def joined(a: Array) -> Array:
        return jnp.moveaxis(a, 0, 2).reshape(B, T, *a.shape[3:])

    part = jax.checkpoint(lambda each: of(*each))
    return jax.tree.map(joined, jax.lax.map(part, tuple(map(cut, arrays))))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def vocabulary_blocks(
    x: Float[Array, "R D"], w: Float[Array, "..."], targets: Int[Array, "R"], order: str
) -> Losses:
    """Computes logits and losses by blocks of the vocabulary.

    Args:
        w: the weight of the head.
        order: the axes of w, "VD" (a tied embedding) or "DV".
    """
    return _forward(x, w, targets, order)[0]


def _blocks(w: Array, order: str) -> list[slice]:
    V = w.shape[order.index("V")]
    size = -(-V // BLOCKS)
    return [slice(low, min(low + size, V)) for low in range(0, V, size)]


def _part(w: Array, block: slice, order: str) -> Array:
    return w[block] if order == "VD" else w[:, block]


def _times(a: Array, w: Array, order: str, letter: str) -> Array:
    """Contracts the last axis of `a` with the axis `letter` of w. Sums in float32 at least."""
    return matmul(a, w, 1, order.index(letter), dtype=sums_in(a.dtype))


def _columns(w: Array, targets: Array, order: str) -> Float[Array, "R D"]:
    return w[targets] if order == "VD" else w[:, targets].T


def _forward(x: Array, w: Array, targets: Array, order: str) -> tuple[Losses, Any]:
    w = w.astype(x.dtype)
    exps, tops, sums = [], [], []
    for block in _blocks(w, order):
        logits = _times(x, _part(w, block, order), order, "D")
        top = jnp.max(logits, -1, keepdims=True)
        p = jnp.exp(logits - top)
        exps.append(p.astype(x.dtype))
        tops.append(top)
        sums.append(jnp.sum(p, -1, keepdims=True))
    each = jnp.concatenate(tops, 1)
    top = jnp.max(each, 1, keepdims=True)
    share = jnp.exp(each - top)
    z = jnp.sum(share * jnp.concatenate(sums, 1), 1, keepdims=True)
    lse = (jnp.log(z) + top)[:, 0]
    right = jnp.sum(wide(x) * wide(_columns(w, targets, order)), -1)
    return (lse - right, lse), (x, w, targets, exps, share / z)


def _backward(order: str, residuals: Any, g: Losses) -> Any:
    """Computes gradients, with d loss / d logits = (g_nll + g_lse) p - g_nll onehot(target)."""
    x, w, targets, exps, share = residuals
    every, right = (g[0] + g[1])[:, None], g[0][:, None]
    dx = -right * wide(_columns(w, targets, order))
    parts = []
    for i, block in enumerate(_blocks(w, order)):
        scale = share[:, i : i + 1] * every
        dx = dx + _times(exps[i], _part(w, block, order), order, "V") * scale
        scaled = x * scale.astype(x.dtype)
        a, b = (exps[i], scaled) if order == "VD" else (scaled, exps[i])
        parts.append(matmul(a, b, 0, 0, dtype=sums_in(a.dtype)))
    dw, seen = jnp.concatenate(parts, order.index("V")), -right * wide(x)
    dw = dw.at[targets].add(seen) if order == "VD" else dw.at[:, targets].add(seen.T)
    return dx.astype(x.dtype), dw, np.zeros(targets.shape, jax.dtypes.float0)


vocabulary_blocks.defvjp(_forward, _backward)
