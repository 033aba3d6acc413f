"""Rewards before they become advantages: sums, the penalty of length, and where a reward stands."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.rl.advantages.totals import at_last, overlong, reward_metrics, total

NAN = math.nan


def test_a_missing_reward_is_left_out_and_a_completion_without_any_stays_missing():
    rewards = jnp.asarray([[[1, 2], [NAN, 2]], [[1, math.inf], [NAN, NAN]]])
    np.testing.assert_allclose(total(rewards, [1.0, 0.5]), [[2, 1], [1, NAN]])
    metrics = reward_metrics(rewards, ["right", "short"])
    values = {name: float(metric.value()) for name, metric in metrics.items()}
    assert values == {"rewards/right": 1.0, "rewards/right/missing": 0.5, "rewards/short": 2.0, "rewards/short/missing": 0.5}


def test_as_many_weights_as_rewards():
    with pytest.raises(BadInput, match="2 rewards and 3 weights"):
        total(jnp.zeros((1, 1, 2)), [1.0, 1.0, 1.0])


def test_the_penalty_of_length_by_hand():
    lengths = jnp.asarray([1.0, 12, 13, 16, 20, 21, 99])
    np.testing.assert_allclose(overlong(lengths, 20, 8), [0, 0, -1 / 8, -0.5, -1, -1, -1])
    np.testing.assert_allclose(overlong(lengths, 20, 0), [0, 0, 0, 0, 0, -1, -1])


@pytest.mark.parametrize("margin", [-1, 21])
def test_a_margin_outside_the_answer_is_refused(margin):
    with pytest.raises(BadInput, match=f"a margin of {margin} tokens for answers of at most 20"):
        overlong(jnp.zeros(1), 20, margin)


def test_a_reward_stands_at_the_last_token_of_its_answer():
    """Not on padding, nor on what an environment wrote after it."""
    mask = jnp.asarray([[1.0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert at_last(jnp.asarray([5.0, 6, 7, 8]), mask).tolist() == [[0, 0, 5, 0], [0, 0, 6, 0], [0, 0, 0, 7], [0, 0, 0, 0]]
