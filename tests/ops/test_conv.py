"""The short convolution against NumPy's, whole and in pieces."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.ops.conv import causal_conv

B, T, C = 2, 19, (3, 2)


def inputs(taps: int):
    rng = np.random.default_rng(taps)
    x, w = rng.standard_normal((B, T, *C)).astype(np.float32), rng.standard_normal((*C, taps)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(rng.standard_normal((B, taps - 1, *C)), jnp.float32)


def oracle(x, w) -> np.ndarray:
    """One sequence [T C] that nothing precedes."""
    each = [np.convolve(x[:, *c], w[*c][::-1])[: len(x)] for c in np.ndindex(*C)]
    return np.stack(each, -1).reshape(x.shape)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_each_sequence_as_if_alone(taps: int):
    """A start at the first token of one row; the other goes on from what came before."""
    x, w, before = inputs(taps)
    starts = jnp.zeros((B, T), bool).at[0, jnp.asarray([0, 5, 6])].set(True).at[1, 11].set(True)
    y, _ = causal_conv(x, w, before, starts, jnp.ones_like(starts))
    for low, high in ((0, 5), (5, 6), (6, T)):
        assert relative(y[0, low:high], oracle(np.asarray(x[0, low:high]), np.asarray(w))) < 1e-6
    longer = np.concatenate([before[1], x[1, :11]])
    assert relative(y[1, :11], oracle(longer, np.asarray(w))[taps - 1 :]) < 1e-6
    assert relative(y[1, 11:], oracle(np.asarray(x[1, 11:]), np.asarray(w))) < 1e-6


@pytest.mark.parametrize("taps", [1, 4])
def test_inputs_are_handed_over(taps: int):
    """In padded pieces, each row with live tokens of its own number, it says what it says at once; garbage before a start."""
    x, w, before = inputs(taps)
    starts = jnp.zeros((B, T), bool).at[:, 0].set(True).at[1, 8].set(True)
    expected, _ = causal_conv(x, w, before, starts, jnp.ones_like(starts))
    state, done, got = jnp.full_like(before, jnp.nan), np.zeros(B, int), [[], []]
    for new in ((1, 2), (4, 0), (0, 3), (5, 4), (1, 1), (8, 9)):
        piece, begins = np.full((B, 9, *C), 99.0, np.float32), np.ones((B, 9), bool)
        for b in range(B):
            piece[b, : new[b]], begins[b, : new[b]] = (
                x[b, done[b] : done[b] + new[b]],
                starts[b, done[b] : done[b] + new[b]],
            )
        live = np.arange(9) < np.asarray(new)[:, None]
        y, after = causal_conv(*map(jnp.asarray, (piece, w, state, begins, live)))
        assert all((after[b] == state[b]).all() for b in range(B) if not new[b])
        state, done = after, done + new
        for b in range(B):
            got[b].append(y[b, : new[b]])
    assert (done == T).all()
    assert relative(jnp.stack([jnp.concatenate(rows) for rows in got]), expected) < 1e-6


def test_bfloat16_is_summed_in_float32():
    x, w, before = inputs(4)
    starts = jnp.zeros((B, T), bool)
    low = x.astype(jnp.bfloat16)
    y, _ = causal_conv(low, w, before.astype(jnp.bfloat16), starts, ~starts)
    full, _ = causal_conv(low.astype(jnp.float32), w, before.astype(jnp.bfloat16).astype(jnp.float32), starts, ~starts)
    assert y.dtype == jnp.bfloat16
    assert (y == full.astype(jnp.bfloat16)).all()
