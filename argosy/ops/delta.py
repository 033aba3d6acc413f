"""The gated delta rule: a state that decays, and in which each key replaces its old value by a new one
(Yang et al. 2024, arXiv:2412.06464; without gates, arXiv:2406.06484).

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}' k_t))'        y_t = S_t' q_t        a_t = exp(decay), b_t = rate

`recurrent` is the specification, one token at a time. `chunked_delta_rule` computes the same function one chunk at a time: a triangular
system gives what each token of a chunk writes, and a scan passes the state from chunk to chunk. At borders between sequences, the decay
between two tokens is masked. Infinities in the running sum of decays would not do, since their differences are NaN.

Each of the K key heads serves G value heads. All is computed in float32 at least, because a state sums over thousands of tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from argosy.ops.precision import sums_in

# The number of tokens of a chunk, as in the paper's kernels and in transformers.
CHUNK = 64


def delta_rule(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G U"],
    decay: Float[Array, "B T K G"],
    rate: Float[Array, "B T K G"],
    state: Float[Array, "B K G H U"],
    starts: Bool[Array, "B T"],
    live: Bool[Array, "B T"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T K G U"], Float[Array, "B K G H U"]]:
    """Computes the output for each query, in float32 at least. Also returns the state after the last live token.

    Args:
        k: keys of length at most 1. With longer keys the state could grow without bound.
        decay: the log of the share of the state that is kept at each token, at most 0.
        rate: the share of a key's old value that is replaced, 0..1.
        state: the state before the first token. It may have any values if that token starts a sequence.
        starts: whether a token starts a sequence, with an empty state.
        live: which tokens are real. The others do not change the state.
        chunk: the number of tokens per chunk. With 1, and for a single token, the recurrence is used.
    """
    kind = sums_in(q.dtype)
    q, k, v, decay, rate, state = (a.astype(kind) for a in (q, k, v, decay, rate, state))
    decay, rate = (jnp.where(live[..., None, None], a, 0) for a in (decay, rate))
    starts = starts & live
    # The previous owner of a slot may have left NaN in the state.
    state = jnp.where(starts[:, 0, None, None, None, None], 0, state)
    T = q.shape[1]
    # By default, accelerators multiply float32 numbers in bfloat16 or TF32.
    with jax.default_matmul_precision("highest"):
        if chunk == 1 or T == 1:
            return recurrent(q, k, v, decay, rate, state, starts)
        # In an export for any length, T is symbolic, and chunks have the full size.
        return chunked_delta_rule(q, k, v, decay, rate, state, starts, min(chunk, T) if isinstance(T, int) else chunk)


def recurrent(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array, starts: Array
) -> tuple[Array, Array]:
    """Computes the delta rule one token at a time. Arguments as in `delta_rule`."""

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, rate, starts = token
        state = jnp.where(starts[:, None, None, None, None], 0, state) * jnp.exp(decay)[..., None, None]
        wrong = v - jnp.einsum("BKGHU,BKH->BKGU", state, k)
        state = state + k[:, :, None, :, None] * (rate[..., None] * wrong)[..., None, :]
        return state, jnp.einsum("BKGHU,BKH->BKGU", state, q)

    state, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, decay, rate, starts)))
    return jnp.moveaxis(y, 0, 1), state


def chunked_delta_rule(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array, starts: Array, size: int
) -> tuple[Array, Array]:
    """Computes the delta rule `size` tokens at a time. Other arguments as in `delta_rule`. In equations, C is the axis of chunks, and I
    and J are axes of tokens within a chunk."""
    T = q.shape[1]
    q, k, v, decay, rate, starts = (_in_chunks(a, size) for a in (q, k, v, decay, rate, starts))
    v, decay, rate = (jnp.moveaxis(a, 2, 4) for a in (v, decay, rate))  # [B C K G I ...]

    # The index of each token's sequence within the chunk. 0 is the sequence that the incoming state belongs to.
    sequence = jax.lax.cumsum(starts.astype(jnp.int32), 2)
    faded = jax.lax.cumsum(decay, 4)
    place = jnp.arange(size)
    same = (sequence[..., :, None] == sequence[..., None, :]) & (place[:, None] >= place)
    same = same[:, :, None, None]
    between = jnp.where(same, jnp.exp(jnp.where(same, faded[..., :, None] - faded[..., None, :], 0)), 0)
    # The share of the incoming state that token I sees.
    past = jnp.where((sequence == 0)[:, :, None, None], jnp.exp(faded), 0)

    # Token I writes rate (v - past S' k), minus what it sees of earlier writes in the chunk. This is a triangular system.
    system = jnp.einsum("BCIKH,BCJKH->BCKIJ", k, k)[:, :, :, None] * between * rate[..., None]
    keys = jnp.moveaxis(k, 2, 3)[:, :, :, None]
    sides = jnp.concatenate([v * rate[..., None], keys * (past * rate)[..., None]], -1)
    solved = unit_solve(system, sides)
    u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    seen = jnp.einsum("BCIKH,BCJKH->BCKIJ", q, k)[:, :, :, None] * between

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, u, w, seen, past, to_end = chunk
        v_new = u - jnp.einsum("BKGIH,BKGHU->BKGIU", w, state)
        y = jnp.einsum("BIKH,BKGHU->BKGIU", q, state) * past[..., None]
        y = y + jnp.einsum("BKGIJ,BKGJU->BKGIU", seen, v_new)
        new = jnp.einsum("BJKH,BKGJU->BKGHU", k, v_new * to_end[..., None])
        return state * past[..., -1, None, None] + new, y

    chunks = (q, k, u, w, seen, past, between[..., -1, :])
    state, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(a, 1, 0) for a in chunks))
    y = jnp.moveaxis(y, (0, 4), (1, 2))  # [B C I K G U]
    return y.reshape(y.shape[0], y.shape[1] * size, *y.shape[3:])[:, :T], state


@jax.custom_vjp
def unit_solve(system: Float[Array, "... I I"], sides: Float[Array, "... I X"]) -> Float[Array, "... I X"]:
    """Solves (1 + L) x = sides, with L the part of `system` below the diagonal, by products with the inverse.

    On a CPU, `jax.lax.linalg.triangular_solve` takes three times as long, and may deadlock when several devices of a process solve at
    once.
    """
    return _product("...IJ,...JX->...IX", unit_inverse(system), sides)


def _forward(system: Array, sides: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = unit_inverse(system)
    x = _product("...IJ,...JX->...IX", inverse, sides)
    return x, (inverse, x)


def _backward(residuals: tuple[Array, Array], dx: Array) -> tuple[Array, Array]:
    inverse, x = residuals
    dsides = _product("...IJ,...IX->...JX", inverse, dx)
    return -jnp.tril(_product("...IX,...JX->...IJ", dsides, x), -1), dsides


unit_solve.defvjp(_forward, _backward)

# The number of rows of the blocks that are inverted row by row.
BLOCK = 8


@jax.jit
def unit_inverse(system: Float[Array, "... I I"]) -> Float[Array, "... I I"]:
    """Computes the inverse of 1 + L, with L the part of `system` below the diagonal.

    Blocks along the diagonal are inverted row by row, all blocks at once. Then pairs of blocks are joined, as in the kernels of
    arXiv:2406.06484: the inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']], with A' and C' the inverses of A and C.

    `observe.flops` does not count these FLOPs, which are a sixth of those of the product that follows.
    """
    *lead, size, _ = system.shape
    block = min(BLOCK, 1 << (size - 1).bit_length())
    full = block << (-(-size // block) - 1).bit_length()
    padded = jnp.pad(jnp.tril(system, -1), [(0, 0)] * len(lead) + [(0, full - size)] * 2)

    def diagonal(n: int) -> Array:
        blocks = padded.reshape(*lead, full // n, n, full // n, n)
        return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, len(lead))

    blocks, unit = diagonal(block), jnp.eye(block, dtype=system.dtype)
    rows = [jnp.broadcast_to(unit[0], (*blocks.shape[:-2], block))]
    for i in range(1, block):
        rows.append(unit[i] - _product("...J,...JX->...X", blocks[..., i, :i], jnp.stack(rows, -2)))
    inverse = jnp.stack(rows, -2)
    while block < full:
        below = diagonal(2 * block)[..., block:, :block]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product("...IJ,...JX->...IX", second, _product("...IJ,...JX->...IX", below, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], -1)], -2)
        block *= 2
    return inverse[..., 0, :size, :size]


def _product(equation: str, a: Array, b: Array) -> Array:
    # Names the precision, because gradients are traced outside of the context in which `delta_rule` sets it.
    return jnp.einsum(equation, a, b, precision="highest")


def _in_chunks(a: Array, size: int) -> Array:
    """Splits an array [B T ...] into chunks [B C size ...]. The zeros at the end are padding, which changes no state."""
    B, T, *rest = a.shape
    chunks = (T + size - 1) // size
    a = jnp.pad(a, [(0, 0), (0, chunks * size - T)] + [(0, 0)] * len(rest))
    return a.reshape(B, chunks, size, *rest)


def delta_flops(tokens: int, K: int, G: int, H: int, U: int, *, chunk: int = CHUNK) -> int:
    """Counts the FLOPs of the contractions over one row of `tokens` tokens, 2 for each multiply-add. The triangular system counts as
    the product with its inverse."""
    if chunk == 1 or tokens == 1:
        return 4 * tokens * K * G * H * U
    size = min(chunk, tokens)
    padded = -(-tokens // size) * size
    return 2 * padded * (2 * size * K * H + K * G * (3 * H * U + size * (H + 2 * U)))
