"""KL estimators against the exact divergence, value and gradient: expectations over a small vocabulary, summed in full."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.rl.policy.kl import estimate, in_reward, kl_loss

V = 6
RNG = np.random.default_rng(2)
LOGITS, REFERENCE, OLDER = (jnp.asarray(RNG.normal(0, 1, (1, V)), jnp.float32) for _ in range(3))
ONES = jnp.ones((1, V))
ESTIMATORS = ("k1", "k2", "k3", "k3+")


def logs(logits):
    return jax.nn.log_softmax(logits)


def divergence(logits, other):
    p, q = logs(logits), logs(other)
    return jnp.sum(jnp.exp(p) * (p - q))


def expected(loss, logits, drawn_from):
    """The expectation of a loss over tokens of a distribution, which is not differentiated: tokens are drawn before."""
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(logs(drawn_from))) * loss(logs(logits)))


def penalty(estimator, **more):
    return lambda new: kl_loss(new, logs(REFERENCE), ONES, coefficient=1.0, estimator=estimator, **more).tokens


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_estimates_by_hand():
    d = math.log(3)
    new, reference, mask = jnp.asarray([[0.0, 0.0]]), jnp.asarray([[-d, math.nan]]), jnp.asarray([[1.0, 0.0]])
    k3 = 1 / 3 - 1 + d
    for estimator, value in {"k1": d, "k2": d * d / 2, "k3": k3, "k3+": k3}.items():
        np.testing.assert_allclose(estimate(new, reference, mask, estimator), [[value, 0]], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_the_expected_value_is_the_divergence(estimator):
    close(expected(penalty(estimator), LOGITS, LOGITS), divergence(LOGITS, REFERENCE))


def test_k2_is_not():
    assert abs(float(expected(penalty("k2"), LOGITS, LOGITS) / divergence(LOGITS, REFERENCE)) - 1) > 0.05


RIGHT = jax.grad(divergence)(LOGITS, REFERENCE)
OTHER_WAY = jax.grad(divergence, 1)(REFERENCE, LOGITS)


@pytest.mark.parametrize(
    ("estimator", "gradient"), [("k1", jnp.zeros((1, V))), ("k2", RIGHT), ("k3", OTHER_WAY), ("k3+", RIGHT)]
)
def test_the_expected_gradient_of_each_estimator_as_a_loss(estimator, gradient):
    """k1 does nothing, k3 is the divergence the other way round; k2 and k3+ are right."""
    close(jax.grad(lambda logits: expected(penalty(estimator), logits, LOGITS))(LOGITS), gradient)


def test_the_default_has_the_right_gradient():
    loss = lambda new: kl_loss(new, logs(REFERENCE), ONES, coefficient=0.5).tokens  # noqa: E731
    close(jax.grad(lambda logits: expected(loss, logits, LOGITS))(LOGITS), 0.5 * RIGHT)
    assert float(np.abs(OTHER_WAY - RIGHT).max()) > 0.05


def test_with_samples_of_an_older_policy_value_and_gradient_stay_right():
    corrected, plain = penalty("k3+", old=logs(OLDER)), penalty("k3+")
    close(expected(corrected, LOGITS, OLDER), divergence(LOGITS, REFERENCE))
    close(jax.grad(lambda logits: expected(corrected, logits, OLDER))(LOGITS), RIGHT)
    assert float(np.abs(jax.grad(lambda logits: expected(plain, logits, OLDER))(LOGITS) - RIGHT).max()) > 0.05


def reward_gradient(estimator):
    """The expected gradient of REINFORCE on a reward that is only the penalty."""
    rewards, _ = in_reward(jnp.zeros((1, V)), logs(LOGITS), logs(REFERENCE), ONES, coefficient=1.0, estimator=estimator)
    return jax.grad(lambda logits: expected(lambda new: -rewards * new, logits, LOGITS))(LOGITS)


def test_in_the_reward_k1_alone_is_right():
    close(reward_gradient("k1"), RIGHT)
    for estimator in ("k2", "k3"):
        assert float(np.abs(reward_gradient(estimator) - RIGHT).max()) > 0.03, estimator


def test_the_penalty_in_the_reward_by_hand():
    rewards, metrics = in_reward(
        jnp.asarray([[0.0, 2.0, 0.0]]),
        jnp.asarray([[-1.0, -2.0, math.nan]]),
        jnp.asarray([[-1.5, -1.0, math.nan]]),
        jnp.asarray([[1.0, 1.0, 0.0]]),
        coefficient=0.1,
    )
    np.testing.assert_allclose(rewards, [[-0.05, 2.1, 0]], rtol=1e-6)
    assert float(metrics["kl"].value()) == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(1) - 2) / 2, rel=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_metric_is_the_divergence_whatever_the_estimator(estimator):
    probs = jnp.exp(logs(LOGITS))
    penalty = kl_loss(logs(LOGITS), logs(REFERENCE), ONES, coefficient=7.0, estimator=estimator)
    k3 = jnp.mean(estimate(logs(LOGITS), logs(REFERENCE), ONES, "k3"))
    assert float(penalty.metrics["kl"].value()) == pytest.approx(float(k3), rel=1e-6)
    assert float(jnp.sum(probs * estimate(logs(LOGITS), logs(REFERENCE), ONES, "k3"))) > 0


def test_a_token_that_the_reference_forbids_leaves_the_loss_finite():
    new, reference, mask = jnp.asarray([[-1000.0]]), jnp.asarray([[0.0]]), jnp.ones((1, 1))
    loss = lambda new: kl_loss(new, reference, mask, coefficient=1.0).tokens.sum()  # noqa: E731
    value, slope = jax.value_and_grad(loss)(new)
    assert np.isfinite(float(value))
    assert float(slope[0, 0]) == -1000
