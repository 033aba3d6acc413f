"""Divergences of a student from a teacher: by hand, with gradients in float64, and at the ends where a distribution has zeros."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.ops.divergence import DIVERGENCES, coarse, forward, jsd, log_probs, resize_vocab, reverse, top

# t = (1/2, 1/4, 1/4), s = (1/8, 1/8, 3/4)
TEACHER, STUDENT = jnp.log(jnp.asarray([0.5, 0.25, 0.25])), jnp.log(jnp.asarray([0.125, 0.125, 0.75]))
RNG = np.random.default_rng(3)
S, T = RNG.normal(0, 1.5, (4, 9)), RNG.normal(0, 2.5, (4, 9))


def test_by_hand():
    ln2, ln3 = math.log(2), math.log(3)
    assert float(forward(STUDENT, TEACHER)) == pytest.approx(0.5 * 2 * ln2 + 0.25 * ln2 - 0.25 * ln3, rel=1e-6)
    assert float(reverse(STUDENT, TEACHER)) == pytest.approx(-0.125 * 2 * ln2 - 0.125 * ln2 + 0.75 * ln3, rel=1e-6)
    # beta = 1/4: m = t / 4 + 3 s / 4 = (7/32, 5/32, 20/32)
    m = [7 / 32, 5 / 32, 20 / 32]
    of_t = 0.5 * math.log(0.5 / m[0]) + 0.25 * math.log(0.25 / m[1]) + 0.25 * math.log(0.25 / m[2])
    of_s = 0.125 * math.log(0.125 / m[0]) + 0.125 * math.log(0.125 / m[1]) + 0.75 * math.log(0.75 / m[2])
    assert float(jsd(STUDENT, TEACHER, 0.25)) == pytest.approx(of_t / 4 + 3 * of_s / 4, rel=1e-6)


def test_jensen_shannon_divided_by_its_share_becomes_forward_and_reverse_at_its_ends():
    """GKD, arXiv:2306.13649, section 2; of these two, a swap of teacher and student would change both."""
    with jax.enable_x64(True):
        ours, theirs = log_probs(jnp.asarray(S)), log_probs(jnp.asarray(T))
        np.testing.assert_allclose(jsd(ours, theirs, 1e-8) / 1e-8, forward(ours, theirs), rtol=1e-3)
        np.testing.assert_allclose(jsd(ours, theirs, 1 - 1e-8) / 1e-8, reverse(ours, theirs), rtol=1e-3)


def gradient(name, beta, temperature):
    """d divergence / d student's logits from probabilities alone, without any log-softmax."""
    s, t = (np.exp(z / temperature - np.max(z / temperature, -1, keepdims=True)) for z in (S, T))
    s, t = s / s.sum(-1, keepdims=True), t / t.sum(-1, keepdims=True)
    if name == "forward":
        outer = -t / s
    elif name == "reverse":
        outer = np.log(s / t) + 1
    else:
        m = beta * t + (1 - beta) * s
        # d/ds of beta KL(t || m) + (1 - beta) KL(s || m); the terms that come from m are constant and leave with the softmax.
        outer = (1 - beta) * np.log(s / m)
    return s * (outer - (s * outer).sum(-1, keepdims=True)) / temperature


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(("name", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.2), ("jsd", 0.9)])
def test_gradients_are_those_of_the_formulas_in_float64(name, beta, temperature):
    with jax.enable_x64(True):
        theirs = log_probs(jnp.asarray(T), temperature)
        gradients = jax.jit(jax.grad(lambda z: jnp.sum(DIVERGENCES[name](log_probs(z, temperature), theirs, beta))))(S)
        assert gradients.dtype == jnp.float64
        np.testing.assert_allclose(gradients, gradient(name, beta, temperature), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["forward", "jsd"])
def test_ids_that_the_teacher_lacks_have_probability_0_and_a_gradient(name):
    """A student padded further than its teacher: its own probability there counts, and falls."""
    theirs = log_probs(resize_vocab(jnp.asarray(T[:, :6], jnp.float32), 9))

    def loss(z):
        return jnp.sum(DIVERGENCES[name](log_probs(z), theirs, 0.5))

    value, slope = jax.jit(jax.value_and_grad(loss))(S.astype(np.float32))
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    assert (np.asarray(slope)[:, 6:] > 0).all()
    student, teacher = np.exp(np.asarray(log_probs(jnp.asarray(S)))), np.exp(np.asarray(log_probs(jnp.asarray(T[:, :6]))))
    by_hand = (teacher * np.log(teacher / student[:, :6])).sum()
    assert name != "forward" or float(value) == pytest.approx(by_hand, rel=1e-5)
    assert resize_vocab(jnp.asarray(T), 6).shape == (4, 6)


def test_the_likeliest_tokens_and_the_rest_by_hand():
    candidates = top(jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]])), 2)
    assert candidates.ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(np.exp(candidates.outcomes), [[0.4, 0.3, 0.3]], rtol=1e-6)
    ours = coarse(jnp.log(jnp.asarray([[0.7, 0.1, 0.1, 0.1]])), candidates.ids)
    np.testing.assert_allclose(np.exp(ours), [[0.1, 0.1, 0.8]], rtol=1e-6)


def test_a_divergence_over_joined_outcomes_grows_with_them_to_the_whole():
    ours, theirs = jnp.asarray(S, jnp.float32), jnp.asarray(T, jnp.float32)
    whole = np.asarray(forward(log_probs(ours, 2.0), log_probs(theirs, 2.0)))
    divergences = []
    for k in (1, 3, 8):
        candidates = top(theirs, k, 2.0)
        divergences.append(np.asarray(forward(coarse(ours, candidates.ids, 2.0), candidates.outcomes)))
    assert (divergences[0] < divergences[1]).all()
    assert (divergences[1] < divergences[2]).all()
    # Of 9 tokens, 8 and the rest are all.
    np.testing.assert_allclose(divergences[2], whole, rtol=1e-5)


def test_the_rest_keeps_its_digits_where_the_student_has_little_of_it():
    """1 minus the others would be 0 in float32 here, and its log -inf."""
    logits = jnp.asarray([[60.0, 1.0, 0.0, 0.0]])
    value, slope = jax.value_and_grad(lambda z: coarse(z, jnp.asarray([[0, 1]]))[0, 2])(logits)
    assert float(value) == pytest.approx(math.log(2) - 60, rel=1e-6)
    np.testing.assert_allclose(slope, [[-1, 0, 0.5, 0.5]], atol=1e-6)
