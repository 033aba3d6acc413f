"""Three ways to one loss, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.ops.cross_entropy import from_logits, row_chunks, vocabulary_blocks

ROWS, D, V = 23, 9, 61


def arrays():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, D)).astype(np.float32)
    w = rng.standard_normal((V, D)).astype(np.float32)
    return x, w, rng.integers(0, V, ROWS).astype(np.int32), rng.standard_normal((2, ROWS)).astype(np.float32)


def test_from_logits_equals_numpy():
    x, w, targets, _ = arrays()
    logits = x.astype(np.float64) @ w.T
    lse = np.log(np.exp(logits).sum(-1))
    got = from_logits(jnp.asarray(x @ w.T), jnp.asarray(targets))
    assert relative(got[0], lse - logits[np.arange(ROWS), targets]) < 1e-6
    assert relative(got[1], lse) < 1e-6


@pytest.mark.parametrize("order", ["VD", "DV"])
@pytest.mark.parametrize("way", ["blocks", "chunks"])
def test_values_and_gradients_agree(order, way):
    x, w, targets, weights = arrays()
    w = jnp.asarray(w if order == "VD" else w.T)
    y = jnp.asarray(targets)

    def head(rows, w):
        return rows @ (w.T if order == "VD" else w)

    ways = {
        "plain": lambda x, w: from_logits(head(x, w), y),
        "blocks": lambda x, w: vocabulary_blocks(x, w, y, order),
        "chunks": lambda x, w: row_chunks(lambda rows: head(rows, w), x, y, 7),
    }

    def loss(way):
        # Different weights on each row, and on the loss and its log partition: a gradient of either alone would show.
        return lambda x, w: sum(jnp.sum(a * b) for a, b in zip(ways[way](x, w), jnp.asarray(weights)))

    expected = jax.value_and_grad(loss("plain"), (0, 1))(jnp.asarray(x), w)
    got = jax.jit(jax.value_and_grad(loss(way), (0, 1)))(jnp.asarray(x), w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert relative(a, b) < 3e-6


def test_huge_logits_stay_finite():
    x, w, targets, _ = arrays()
    got = vocabulary_blocks(jnp.asarray(x * 1e3), jnp.asarray(w), jnp.asarray(targets), "VD")
    expected = from_logits(jnp.asarray(x * 1e3) @ jnp.asarray(w).T, jnp.asarray(targets))
    assert relative(got[0], expected[0]) < 1e-6
