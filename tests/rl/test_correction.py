"""Importance weights between sampler and trainer: by hand, what is missing, and metrics that add up."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.rl.policy.correction import correction

NAN = math.nan
WEIGHTS = np.asarray([[3.0, 0.5, 0.25, 9], [2.0, 1.0, 9, 9]])
MASK = jnp.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], jnp.float32)
TRAINER = jnp.where(MASK > 0, -1.5, NAN).astype(jnp.float32)
SAMPLER = TRAINER - jnp.log(jnp.asarray(WEIGHTS, jnp.float32))


def values(metrics):
    return {name: float(metric.value()) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("options", "weights", "outside"),
    [
        ({}, [[2, 0.5, 0.25, 1], [2, 1, 1, 1]], 1 / 5),
        ({"lowest": 0.4}, [[2, 0.5, 0.4, 1], [2, 1, 1, 1]], 2 / 5),
        ({"outside": "mask", "lowest": 0.4}, [[0, 0.5, 0, 1], [2, 1, 1, 1]], 2 / 5),
        ({"level": "sequence", "highest": 1.5}, [[0.375], [1.5]], 1 / 2),
        ({"level": "sequence", "outside": "mask", "lowest": 0.5, "highest": 1.5}, [[0], [0]], 1),
        ({"level": "sequence", "outside": "mask"}, [[0.375], [2]], 0),
    ],
)
def test_weights_by_hand(options, weights, outside):
    # Bounds a rounding wider than the weights that lie on them.
    result = correction(
        TRAINER, SAMPLER, MASK, **{"highest": 2.0, **options} | ({} if "highest" in options else {"highest": 2.0 + 1e-6})
    )
    np.testing.assert_allclose(result.weights, weights, rtol=2e-6)
    assert values(result.metrics)["sampler/outside"] == pytest.approx(outside)


def test_the_metrics_by_hand():
    metrics = values(correction(TRAINER, SAMPLER, MASK, highest=10.0).metrics)
    logs = [math.log(3), math.log(2), math.log(4), math.log(2), 0]
    weights = np.asarray([3, 0.5, 0.25, 2, 1])
    expected = {
        "sampler/difference_max": math.log(4),
        "sampler/difference_mean": sum(logs) / 5,
        "sampler/outside": 0,
        "sampler/missing": 0,
        "sampler/effective": weights.sum() ** 2 / (5 * (weights**2).sum()),
    }
    assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_log_probabilities_need_no_correction(level):
    corrected = correction(TRAINER, TRAINER, MASK, level=level)
    assert np.all(np.asarray(corrected.weights) == 1)
    assert values(corrected.metrics) == {
        "sampler/difference_max": 0, "sampler/difference_mean": 0, "sampler/outside": 0, "sampler/missing": 0, "sampler/effective": 1,
    }  # fmt: skip


def test_a_missing_log_probability_is_counted_and_not_a_difference():
    corrected = correction(TRAINER, SAMPLER.at[0, 0].set(NAN), MASK)
    assert float(corrected.weights[0, 0]) == 1
    assert values(corrected.metrics)["sampler/missing"] == pytest.approx(1 / 5)
    assert values(corrected.metrics)["sampler/difference_mean"] == pytest.approx((2 * math.log(2) + math.log(4)) / 4, rel=1e-6)


def test_weights_have_no_gradient():
    slope = jax.grad(lambda trainer: correction(trainer, SAMPLER, MASK).weights.sum())(TRAINER)
    assert not np.any(np.asarray(slope))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_metrics_of_parts_add_up(level):
    whole = correction(TRAINER, SAMPLER, MASK, level=level).metrics
    parts = [correction(TRAINER[i : i + 1], SAMPLER[i : i + 1], MASK[i : i + 1], level=level).metrics for i in (0, 1)]
    for name, metric in whole.items():
        assert float((parts[0][name] + parts[1][name]).value()) == pytest.approx(float(metric.value()), rel=1e-6), name


def test_weighing_makes_samples_of_another_distribution_unbiased():
    """Over all tokens of a small vocabulary: the expectation under the sampler of weight times loss is that under the trainer."""
    rng = np.random.default_rng(0)
    trainer, sampler = (jax.nn.log_softmax(jnp.asarray(rng.normal(0, 0.3, (1, 5)), jnp.float32)) for _ in range(2))
    loss = jnp.asarray(rng.normal(0, 1, (1, 5)), jnp.float32)
    weights = correction(trainer, sampler, jnp.ones((1, 5)), highest=10.0).weights
    assert float(jnp.sum(jnp.exp(sampler) * weights * loss)) == pytest.approx(float(jnp.sum(jnp.exp(trainer) * loss)), rel=1e-5)


@pytest.mark.parametrize("bounds", [{"highest": 0.5}, {"lowest": 1.5}, {"lowest": -1.0}])
def test_bounds_that_leave_out_no_difference_are_refused(bounds):
    with pytest.raises(BadInput, match="importance weights between"):
        correction(TRAINER, SAMPLER, MASK, **bounds)
