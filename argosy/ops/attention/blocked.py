"""Causal attention for CPUs: blocks of query rows, each against only the keys that it sees, with its own backward pass. `bidirectional`
computes attention that is not causal.

Half of the scores of a causal layer are never computed, and with a window even fewer are. The forward pass keeps unnormalized
probabilities, so that the backward pass computes no exponentials. The result is exact. On two cores of an AVX-512 server, a 31M model
spent 543 ms per step in attention with the reference, and 363 ms with this.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.ops.attention import Score, See, attention_reference, of_segments
from argosy.ops.attention.bidirectional import bidirectional
from argosy.ops.op import Implementation
from argosy.ops.precision import sums_in, wide

# The segment of each token, and the segment that is its prefix. None: each row is one segment, or there are no prefixes.
Segments = tuple[Int[Array, "B T"] | None, Int[Array, "B T"] | None]

# The default number of rows of a block, the fastest of 32, 64 and 128 at 256 tokens.
BLOCK = 64
# The numbers of rows that `argosy autotune` measures.
SIZES = (32, 64, 128, 256, 512)
# The most blocks. The program is unrolled over blocks, so longer sequences get longer blocks.
MOST_BLOCKS = 16
# With fewer queries than this, in both directions, the reference computes. A bundle with open sizes has the reference, so it equals the
# module to the last bit for sentences.
FEWEST = 256


def _refuses(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    if see.picked is not None:
        return "no choice of keys by queries"
    if not see.aligned and (see.causal or score.window is not None):
        return "only whole sequences, or all keys of another one"
    if score.cap is not None or score.sinks is not None or score.bias is not None:
        return "no soft cap, no sinks and no bias"
    if lse:
        return "no log-sum-exp"
    if not (isinstance(q.shape[1], int) and isinstance(k.shape[1], int)):
        return "only a length that is known when the program is made"
    return None


def _run(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool = False, block: int = BLOCK) -> Array:
    if not see.causal:
        if q.shape[1] < FEWEST:
            return attention_reference(q, k, v, see, score)
        return bidirectional(q, k, v, see, score, block)
    return _attend(q, k, v, (see.q_segment, see.q_prefix), score.scale, score.window, block)


def _blocks(q: Array, k: Array, v: Array, see: See, *_: Any) -> list[int]:
    T = q.shape[1]
    if not see.causal:
        return [size for size in SIZES if size != BLOCK and size < T]
    # Sizes below the smallest block that `MOST_BLOCKS` allows give the same program. A single block would compute all scores.
    return [size for size in SIZES if size != _block_size(T, BLOCK) and -(-T // MOST_BLOCKS) <= size < T]


BLOCKED = Implementation(_run, _refuses, _blocks)


class _Block:
    """One block of query rows. Rows start..stop-1 see keys low..stop-1."""

    def __init__(self, start: int, stop: int, low: int):
        self.start, self.stop, self.low = start, stop, low

    def visible(self, window: int | None) -> np.ndarray:
        """Returns the mask [rows keys] of the keys that each row sees, by position only."""
        ahead = np.arange(self.start, self.stop)[:, None] - np.arange(self.low, self.stop)[None, :]
        return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def query_blocks(T: int, window: int | None, block: int = BLOCK) -> list[_Block]:
    size = _block_size(T, block)
    starts = range(0, T, size)
    return [_Block(a, min(a + size, T), 0 if window is None else max(0, a - window + 1)) for a in starts]


def _block_size(T: int, block: int) -> int:
    return max(block, -(-T // MOST_BLOCKS))


def _masked(s: Array, block: _Block, segments: Segments, window: int | None, groups: int) -> Array:
    """Sets scores [B K rows keys] to `UNSEEN` for keys that a row does not see. Rows are (query head of the key head, time)."""
    see = jnp.asarray(block.visible(window))[None]
    ids, prefix = segments
    if ids is not None:
        mine, theirs = ids[:, block.start : block.stop], ids[:, block.low : block.stop]
        see = see & of_segments(mine, theirs, prefix if prefix is None else prefix[:, block.start : block.stop])
    B, K, rows, keys = s.shape
    apart = s.reshape(B, K, groups, rows // groups, keys)
    return jnp.where(see[:, None, None], apart, -1e30).reshape(s.shape)


def _rows(x: Float[Array, "B T N H"], K: int, block: _Block) -> Float[Array, "B K rows H"]:
    """Cuts one block out of queries (or outputs, or their gradients), with the query heads of a key head stacked along the rows."""
    B, _, N, H = x.shape
    part = x[:, block.start : block.stop].reshape(B, -1, K, N // K, H)
    return part.transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)


def _unrows(parts: list[Array], N: int) -> Float[Array, "B T N H"]:
    def back(part: Array) -> Array:
        B, K, _, H = part.shape
        return part.reshape(B, K, N // K, -1, H).transpose(0, 3, 1, 2, 4).reshape(B, -1, N, H)

    return jnp.concatenate([back(part) for part in parts], 1)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Multiplies, batched over B and K, contracting one axis of each. Sums in float32 at least."""
    axes = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=sums_in(a.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q: Array, k: Array, v: Array, segments: Segments, scale: float, window: int | None, size: int) -> Array:
    return _forward(q, k, v, segments, scale, window, size)[0]


def _forward(q: Array, k: Array, v: Array, segments: Segments, scale: float, window: int | None, size: int) -> Any:
    T, N, K = q.shape[1], q.shape[2], k.shape[2]
    kt, vt = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outs, saved = [], []
    for block in query_blocks(T, window, size):
        rows = _rows(q * scale, K, block)
        keys, values = kt[:, :, block.low : block.stop], vt[:, :, block.low : block.stop]
        s = _dot(rows, keys, (3, 3))
        s = _masked(s, block, segments, window, N // K)
        p = jnp.exp(s - jnp.max(s, -1, keepdims=True))
        z = 1 / jnp.sum(p, -1, keepdims=True)
        p = p.astype(v.dtype)
        out = (_dot(p, values, (3, 2)) * z).astype(v.dtype)
        outs.append(out)
        saved.append((rows, p, z, out))
    return _unrows(outs, N), (kt, vt, saved, segments)


def _backward(scale: float, window: int | None, size: int, residuals: Any, g: Array) -> Any:
    kt, vt, saved, segments = residuals
    T, N = g.shape[1:3]
    K = kt.shape[1]
    dq, dk, dv = [], [], []
    for block, (rows, p, z, out) in zip(query_blocks(T, window, size), saved):
        keys, values = kt[:, :, block.low : block.stop], vt[:, :, block.low : block.stop]
        go = (wide(_rows(g, K, block)) * z).astype(g.dtype)
        inner = jnp.sum(wide(go) * wide(out), -1, keepdims=True)
        ds = (wide(p) * (_dot(go, values, (3, 3)) - inner)).astype(g.dtype)
        dq.append(_dot(ds, keys, (3, 2)) * scale)
        dk.append((block, _dot(ds, rows, (2, 2))))
        dv.append((block, _dot(p, go, (2, 2))))
    back = partial(_gather, T=T)
    typed = (_unrows(dq, N), back(dk), back(dv))
    return *(d.astype(g.dtype) for d in typed), jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), segments)


def _gather(parts: list[tuple[_Block, Array]], T: int) -> Float[Array, "B T K H"]:
    """Sums the gradients of all blocks' keys. The result is cut where blocks start or stop, so that every piece is a sum of slices."""
    cuts = sorted({0, T, *(b.low for b, _ in parts), *(b.stop for b, _ in parts)})
    pieces = []
    for lo, hi in pairwise(cuts):
        pieces.append(sum(d[:, :, lo - b.low : hi - b.low] for b, d in parts if b.low <= lo and hi <= b.stop))
    return jnp.concatenate(pieces, 2).transpose(0, 2, 1, 3)


_attend.defvjp(_forward, _backward)
