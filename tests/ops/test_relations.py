"""Divergences of relations: against another implementation of MiniLMv2, by hand, and with what a token does not see."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.ops.relations import relation_divergence

THEIRS = json.loads((Path(__file__).parents[1] / "goldens" / "relations.json").read_text(encoding="utf-8"))
PLACE = {"qq": 0, "kk": 1, "vv": 2}
ONE = jnp.ones((1, 2), jnp.int32)


def heads_of(x, heads):
    """Features [B T F] as a model's own heads; how many it has must not matter."""
    return jnp.asarray(x).reshape(*np.shape(x)[:2], heads, -1)


@pytest.mark.parametrize("case", THEIRS["cases"], ids=lambda case: f"{case['relation']}-{case['heads']}")
def test_losses_and_gradients_equal_those_of_another_implementation(case):
    """Of models of different widths; two sequences of different lengths, whose means over tokens are averaged there."""
    with jax.enable_x64(True):
        i, lengths = PLACE[case["relation"]], np.asarray(THEIRS["lengths"], float)
        ours, theirs = jnp.asarray(THEIRS["student"][i]), jnp.asarray(THEIRS["teacher"][i])
        inside = np.arange(ours.shape[1]) < lengths[:, None]
        segments = jnp.asarray(inside, jnp.int32)

        def loss(ours):
            sides = [(heads_of(x, n),) * 2 for x, n in ((ours, 3), (theirs, 2))]
            each = relation_divergence(*sides, segments, case["heads"])
            return jnp.mean(jnp.sum(jnp.where(inside, each, 0.0), 1) / lengths)

        value, slope = jax.value_and_grad(loss)(ours)
        assert float(value) == pytest.approx(case["loss"], rel=1e-12)
        np.testing.assert_allclose(slope, case["gradient"], rtol=1e-9, atol=1e-14)


def test_by_hand():
    """Two tokens and one head of size 4: the first sees itself alone, the second both, with scores 0 and a/2 here, 0 and b/2 there."""
    a, b = 2 * math.log(3), 2 * math.log(4)
    student, teacher = (jnp.asarray([[[[0.0] * 4], [[math.sqrt(x), 0, 0, 0]]]]) for x in (a, b))
    divergence = relation_divergence((student, student), (teacher, teacher), ONE, 1)
    # (1/4, 3/4) here and (1/5, 4/5) there.
    expected = 0.2 * math.log(0.2 / 0.25) + 0.8 * math.log(0.8 / 0.75)
    np.testing.assert_allclose(divergence, [[0.0, expected]], rtol=1e-6, atol=1e-7)


def random_heads(seed, heads, size, rows=2, tokens=9):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, (rows, tokens, heads, size)), jnp.float32)


def test_the_two_sides_may_differ():
    """Queries against keys, in relation heads that are the layer's heads: attention, by NumPy."""
    q, k, r, s = (np.asarray(random_heads(i, 2, 3), np.float64) for i in range(4))
    ours, theirs = (tuple(jnp.asarray(x, jnp.float32) for x in pair) for pair in ((q, k), (r, s)))
    divergence = relation_divergence(ours, theirs, jnp.ones((2, 9), jnp.int32), 2)
    expected = np.zeros((2, 9))
    for row, t, head in np.ndindex(2, 9, 2):
        probs_own, other = (np.exp(x[row, t, head] @ y[row, : t + 1, head].T / 3**0.5) for x, y in ((q, k), (r, s)))
        probs_own, other = probs_own / probs_own.sum(), other / other.sum()
        expected[row, t] += (other * np.log(other / probs_own)).sum() / 2
    np.testing.assert_allclose(divergence, expected, rtol=1e-4, atol=1e-6)


def test_sequences_of_a_row_do_not_see_each_other_and_padding_does_not_matter():
    ours, theirs = random_heads(1, 2, 6), random_heads(2, 3, 8)
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0]] * 2, jnp.int32)
    whole = relation_divergence((ours, ours), (theirs, theirs), segments, 4)
    for part in (slice(0, 4), slice(4, 7)):
        alone = [x[:, part] for x in (ours, theirs)]
        alone_divergence = relation_divergence((alone[0],) * 2, (alone[1],) * 2, segments[:, part], 4)
        np.testing.assert_allclose(whole[:, part], alone_divergence, rtol=1e-5, atol=1e-7)
    other = [x.at[:, 7:].set(1e4) for x in (ours, theirs)]
    again = relation_divergence((other[0],) * 2, (other[1],) * 2, segments, 4)
    np.testing.assert_array_equal(again[:, :7], whole[:, :7])
    assert np.isfinite(again).all()


def test_equal_relations_are_0_and_gradients_are_finite():
    """Relations do not change where every vector of a model is turned alike."""
    x = random_heads(1, 2, 6)
    turn = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(0, 1, (3, 3)))[0], jnp.float32)
    turned = (x.reshape(2, 9, 4, 3) @ turn).reshape(x.shape)
    segments = jnp.ones((2, 9), jnp.int32)
    assert float(jnp.max(jnp.abs(relation_divergence((x, x), (x, x), segments, 4)))) == 0
    np.testing.assert_allclose(relation_divergence((x, x), (turned, turned), segments, 4), 0, atol=1e-6)
    huge = 1e4 * random_heads(3, 2, 6)
    slope = jax.grad(lambda x: jnp.sum(relation_divergence((x, x), (huge, huge), segments, 4)))(x)
    assert np.isfinite(slope).all()
    assert np.abs(slope).max() > 0


def test_one_relation_head_exists_at_a_time():
    """48 heads take the temporaries of 3."""
    tokens, sizes = 256, {}
    for heads in (3, 48):
        x = jax.ShapeDtypeStruct((1, tokens, 6, 32), jnp.float32)

        def loss(x, y, heads=heads):
            return jnp.sum(relation_divergence((x, x), (y, y), jnp.ones((1, tokens), jnp.int32), heads))

        sizes[heads] = jax.jit(jax.grad(loss)).lower(x, x).compile().memory_analysis().temp_size_in_bytes
    assert sizes[48] < 1.5 * sizes[3]
    assert sizes[48] < 48 * tokens * tokens * 4 / 2
