"""Advantages: by hand, equal and missing rewards, and the same however groups are ordered and rows are padded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.rl.advantages.gae import gae
from argosy.rl.advantages.groups import Advantages
from argosy.rl.algorithms.gdpo import gdpo
from argosy.rl.algorithms.gpg import gpg
from argosy.rl.algorithms.grpo import grpo
from argosy.rl.algorithms.opo import opo
from argosy.rl.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from argosy.rl.algorithms.remax import remax
from argosy.rl.algorithms.rloo import rloo

NAN, INF = math.nan, math.inf


def array(values):
    return jnp.asarray(values, jnp.float32)


def two(rewards):
    """A second reward beside the given one, of another scale, equal where it is."""
    return jnp.stack([rewards, 10 * rewards + 3], -1)


# Each from rewards alone: what else it reads is the same for all completions, or equal to the mean.
GROUPED = {
    "grpo": grpo,
    "grpo over the batch": lambda r: grpo(r, scale="batch"),
    "dr grpo": lambda r: grpo(r, scale="none"),
    "rloo": rloo,
    "reinforce++ with baseline": reinforce_pp_baseline,
    "opo": lambda r: opo(r, jnp.broadcast_to(array([3.0, 5.0, 2.0, 4.0, 1.0])[: r.shape[1]], r.shape)),
    "gpg": gpg,
    "gdpo": lambda r: gdpo(two(r), [1.0, 0.5]),
}
each_algorithm = pytest.mark.parametrize("algorithm", GROUPED.values(), ids=GROUPED)

# Of the first group: mean 1, std 2 (n - 1). The second is all equal.
REWARDS = array([[0.0, 0.0, 4.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
BY_HAND = {
    "grpo": [-0.5, -0.5, 1.5, -0.5],
    # std of 0 0 4 0 2 2 2 2, mean 1.5: squared distances 3 * 2.25 + 6.25 + 4 * 0.25 = 14, over 7 is 2.
    "grpo over the batch": [x / math.sqrt(2) for x in (-1, -1, 3, -1)],
    "dr grpo": [-1, -1, 3, -1],
    "rloo": [-4 / 3, -4 / 3, 4, -4 / 3],
    # Centered -1 -1 3 -1 and four zeros: mean 0, sum of squares 12 over 7.
    "reinforce++ with baseline": [x / math.sqrt(12 / 7) for x in (-1, -1, 3, -1)],
    # Lengths 3 5 2 4: the baseline is 2 * 4 / 14.
    "opo": [-4 / 7, -4 / 7, 4 - 4 / 7, -4 / 7],
    # One of two groups is useful: twice the centered rewards.
    "gpg": [-2, -2, 6, -2],
    # Each reward gives -.5 -.5 1.5 -.5, times 1.5; the sum of squares 3 * 2.25, over 7 completions.
    "gdpo": [1.5 * x / math.sqrt(3 * 2.25 / 7) for x in (-0.5, -0.5, 1.5, -0.5)],
}


@pytest.mark.parametrize("name", GROUPED)
def test_advantages_by_hand(name):
    advantages = GROUPED[name](REWARDS)
    np.testing.assert_allclose(advantages.values[0], BY_HAND[name], rtol=3e-6)
    assert advantages.values[1].tolist() == [0, 0, 0, 0]
    assert advantages.useful.tolist() == [[True], [False]]
    assert float(advantages.metrics["groups/useless"].value()) == 0.5
    assert float(advantages.metrics["rewards/missing"].value()) == 0


def test_the_metrics_of_rewards_by_hand():
    metrics = grpo(array([[0, 0, 4, 0], [2, 2, NAN, 2]])).metrics
    assert float(metrics["reward"].value()) == pytest.approx(10 / 7)
    assert float(metrics["reward_std"].value()) == pytest.approx((2 + 0) / 2)
    assert float(metrics["rewards/missing"].value()) == pytest.approx(1 / 8)


# 0.1 + 0.2 is not 0.3, and the mean of five 0.7 is not 0.7, in float32.
EQUAL = [[0.7] * 5, [0.1 + 0.2, 0.3, 0.3, 0.3, 0.3], [-1e-7] * 5, [0.0] * 5, [3e8] * 5]
SUM = np.float32(0.1) + np.float32(0.6)


@each_algorithm
@pytest.mark.parametrize("group", [*EQUAL, [SUM, 0.7, SUM, 0.7, 0.7]])
def test_equal_rewards_give_exact_zeros_and_are_counted(algorithm, group):
    advantages = algorithm(array([group]))
    assert advantages.values.tolist() == [[0.0] * 5]
    assert float(advantages.metrics["groups/useless"].value()) == 1


def test_the_sum_of_the_test_above_is_another_number():
    assert np.float32(0.7) != SUM


@each_algorithm
def test_rewards_that_differ_by_little_are_not_equal(algorithm):
    advantages = algorithm(array([[1e-5, 2e-5, 3e-5]]))
    assert bool(advantages.useful[0, 0])
    assert float(advantages.values[0, 0]) < 0 < float(advantages.values[0, 2])


@each_algorithm
def test_a_missing_reward_is_not_zero(algorithm):
    """The others' advantages are those of a group without it."""
    advantages = algorithm(array([[1, 3, 5, NAN], [0, 2, 1, INF]]))
    without = algorithm(array([[1, 3, 5], [0, 2, 1]]))
    np.testing.assert_allclose(advantages.values[:, :3], without.values, rtol=1e-6)
    assert advantages.values[:, 3].tolist() == [0, 0]
    assert advantages.scored.tolist() == [[True, True, True, False]] * 2
    assert float(advantages.metrics["rewards/missing"].value()) == 0.25
    assert float(algorithm(array([[1, 3, 5, 0], [0, 2, 1, 0]])).values[0, 0]) != float(advantages.values[0, 0])


@each_algorithm
@pytest.mark.parametrize("group", [[NAN, NAN, NAN], [NAN, 4.0, NAN]])
def test_a_group_with_fewer_than_two_rewards_is_useless(algorithm, group):
    advantages = algorithm(array([group]))
    assert advantages.values.tolist() == [[0, 0, 0]]
    assert not advantages.useful[0, 0]


@each_algorithm
def test_the_order_of_groups_changes_nothing(algorithm):
    rewards = np.random.default_rng(0).normal(0, 2, (5, 3)).astype(np.float32)
    order = np.asarray([3, 0, 4, 2, 1])
    advantages, again = algorithm(jnp.asarray(rewards)), algorithm(jnp.asarray(rewards[order]))
    np.testing.assert_allclose(again.values, np.asarray(advantages.values)[order], rtol=2e-6, atol=1e-7)


def test_grpo_and_rloo_are_one_but_for_a_factor():
    """Of n completions, RLOO's advantage is n / (n - 1) times that over the mean."""
    rewards = jnp.asarray(np.random.default_rng(1).normal(0, 1, (3, 5)), jnp.float32)
    np.testing.assert_allclose(rloo(rewards).values, grpo(rewards, scale="none").values * 5 / 4, rtol=2e-5, atol=1e-6)


def test_rows_leave_completions_without_reward_out_of_the_mask():
    advantages = grpo(array([[1, NAN], [0, 1]]))
    values, mask = advantages.rows(jnp.ones((4, 3)))
    assert values[:, 0].tolist() == advantages.values.reshape(-1).tolist()
    assert mask[:, 0].tolist() == [1, 0, 1, 1]


def test_advantages_can_be_compiled():
    advantages = jax.jit(grpo)(REWARDS)
    assert isinstance(advantages, Advantages)
    assert advantages.values.tolist() == grpo(REWARDS).values.tolist()


# ---------------------------------------------------------------- ReMax, REINFORCE++, GDPO


def test_remax_by_hand():
    advantages = remax(array([[1.0, 4.0], [2.0, 2.0], [3.0, NAN], [1.0, 5.0]]), array([[2.0], [2.0], [1.0], [NAN]]))
    assert advantages.values.tolist() == [[-1, 2], [0, 0], [2, 0], [0, 0]]
    assert advantages.useful[:, 0].tolist() == [True, False, True, False]
    assert advantages.scored.tolist() == [[True, True], [True, True], [True, False], [False, False]]


def test_remax_learns_from_one_sample_a_prompt():
    advantages = remax(array([[1.0], [2.0]]), array([[0.0], [2.0]]))
    assert advantages.values.tolist() == [[1.0], [0.0]]
    assert advantages.useful.tolist() == [[True], [False]]


MASK = array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])


def test_reinforce_pp_by_hand():
    """The advantage of a token is the reward less the penalties from it on; normalized over the seven tokens that have one."""
    penalty = array([[0.5, 0.25, NAN], [0, 0, 1], [0, NAN, NAN], [9, 9, 9]])
    advantages = reinforce_pp(array([[1.0, 2.0], [3.0, NAN]]), MASK, penalty)
    returns = [[0.25, 0.75, 0], [1, 1, 1], [3, 0, 0], [0, 0, 0]]
    assert advantages.returns.tolist() == returns
    tokens = np.asarray([0.25, 0.75, 1, 1, 1, 3])
    normal = (tokens - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(np.asarray(advantages.values)[np.asarray(advantages.mask) > 0], normal, rtol=2e-6)
    assert advantages.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert advantages.values[3].tolist() == [0, 0, 0]


def test_reinforce_pp_of_a_batch_of_equal_rewards_is_zero():
    advantages = reinforce_pp(array([[0.7, 0.7], [0.7, 0.7]]), MASK)
    assert advantages.values.tolist() == [[0, 0, 0]] * 4


def test_reinforce_pp_needs_no_groups():
    """Answers that are all right are better than the batch."""
    advantages = reinforce_pp(array([[1.0, 1.0], [0.0, 0.0]]), MASK)
    assert float(advantages.values[0, 0]) > 0 > float(advantages.values[2, 0])


def test_equal_groups_stay_at_zero_under_the_baseline_whatever_their_length():
    advantages = reinforce_pp_baseline(array([[0.0, 1.0], [1.0, 1.0]]))
    assert advantages.values[1].tolist() == [0, 0]
    assert float(advantages.values[0, 1]) > 0


def test_gdpo_tells_apart_what_a_sum_makes_equal():
    """Answers (1, 0) and (0, 1) have one sum; the rarer achievement is worth more when each is normalized."""
    rewards = array([[[1, 0], [0, 1], [1, 0], [1, 0]]])
    assert not grpo(rewards.sum(-1)).useful[0, 0]
    advantages = gdpo(rewards, [1.0, 3.0])
    assert advantages.useful[0, 0]
    assert float(advantages.values[0, 1]) > 0 > float(advantages.values[0, 0])


def test_gdpo_gives_no_advantage_for_a_reward_of_weight_zero():
    advantages = gdpo(array([[[1, 0], [1, 1]]]), [1.0, 0.0])
    assert advantages.values.tolist() == [[0, 0]]
    assert not advantages.useful[0, 0]


def test_gdpo_leaves_out_a_reward_that_is_missing():
    rewards = array([[[0, 1], [2, NAN], [4, 3]]])
    advantages = gdpo(rewards, [1.0, 1.0])
    summed = np.asarray([-1 - 1 / math.sqrt(2), 0, 1 + 1 / math.sqrt(2)])
    np.testing.assert_allclose(advantages.values[0], summed / summed.std(ddof=1), rtol=3e-6, atol=1e-6)
    assert advantages.scored.tolist() == [[True, True, True]]


def test_as_many_weights_as_rewards():
    with pytest.raises(BadInput, match="2 rewards and 1 weight"):
        gdpo(array([[[1, 0], [1, 1]]]), [1.0])


# ---------------------------------------------------------------- GAE


def one_row(*rows):
    return [array([row]) for row in rows]


def test_gae_by_hand():
    rewards, values, mask = one_row([0, 0, 1], [0.5, 0.2, 0.4], [1, 1, 1])
    result = gae(rewards, values, mask, gamma=0.9, lam=0.5, normalize=False)
    last = 1 - 0.4
    middle = 0.9 * 0.4 - 0.2 + 0.45 * last
    first = 0.9 * 0.2 - 0.5 + 0.45 * middle
    np.testing.assert_allclose(result.values[0], [first, middle, last], rtol=1e-6)
    np.testing.assert_allclose(result.returns[0], [first + 0.5, middle + 0.2, 1], rtol=1e-6)


def test_with_lambda_one_the_advantage_is_the_return_less_the_value():
    rewards, values, mask = one_row([0.5, 0, 2], [0.5, 0.2, 0.4], [1, 1, 1])
    result = gae(rewards, values, mask, lam=1.0, normalize=False)
    np.testing.assert_allclose(result.returns[0], [2.5, 2, 2], rtol=1e-6)


def test_a_cut_answer_is_worth_what_the_critic_expects_after_it():
    rewards, values, mask = ([jnp.concatenate([x, x]) for x in one_row([0, 0], [0.5, 0.2], [1, 1])])
    result = gae(rewards, values, mask, array([0.0, 3.0]), gamma=0.5, lam=1.0, normalize=False)
    np.testing.assert_allclose(result.returns, [[0, 0], [0.75, 1.5]], atol=1e-7)


def test_padding_changes_no_advantage():
    rewards, values, mask = one_row([0, 1], [0.5, 0.2], [1, 1])
    longer = [jnp.pad(x, ((0, 0), (0, 3)), constant_values=fill) for x, fill in ((rewards, 0), (values, NAN), (mask, 0))]
    result, padded = gae(rewards, values, mask, array([2.0])), gae(*longer, array([2.0]))
    assert padded.values[:, :2].tolist() == result.values.tolist()
    assert padded.values[:, 2:].tolist() == [[0, 0, 0]]


def test_a_reward_on_padding_is_that_of_the_last_token():
    rewards, values, mask = one_row([0, 0, 0, 1], [0.5, 0.2, 0, 0], [1, 1, 0, 0])
    at_eos = array([[0, 1, 0, 0]])
    assert gae(rewards, values, mask, normalize=False).values.tolist() == gae(at_eos, values, mask, normalize=False).values.tolist()


def test_tokens_of_an_environment_are_skipped():
    """The same as if they were not there, and their reward is that of the action before them."""
    rewards, values, mask = one_row([0, 0.3, 0, 1], [0.5, 9, 9, 0.2], [1, 0, 0, 1])
    short = gae(*one_row([0.3, 1], [0.5, 0.2], [1, 1]), gamma=0.9, lam=0.7, normalize=False)
    result = gae(rewards, values, mask, gamma=0.9, lam=0.7, normalize=False)
    np.testing.assert_allclose(np.asarray(result.values)[0, [0, 3]], short.values[0], rtol=1e-6)
    assert result.values[0, 1:3].tolist() == [0, 0]


def test_normalized_advantages_leave_the_returns_alone():
    rng = np.random.default_rng(0)
    rewards, values = (jnp.asarray(rng.normal(0, 1, (4, 3)), jnp.float32) for _ in range(2))
    result, raw = (gae(rewards, values, MASK, normalize=normalize) for normalize in (True, False))
    live = np.asarray(result.values)[np.asarray(MASK) > 0]
    assert live.mean() == pytest.approx(0, abs=1e-6)
    assert live.std(ddof=1) == pytest.approx(1, rel=1e-5)
    assert result.returns.tolist() == raw.returns.tolist()


@pytest.mark.slow
def test_a_row_with_a_missing_reward_takes_no_part():
    rewards = array([[0, 1], [0, NAN]])
    values, mask = array([[0.5, 0.2], [0.5, 0.2]]), jnp.ones((2, 2))
    result = gae(rewards, values, mask, array([0, 1.0]))
    alone = gae(rewards[:1], values[:1], mask[:1], array([0]))
    assert result.values[0].tolist() == alone.values[0].tolist()
    assert result.mask.tolist() == [[1, 1], [0, 0]]
    assert result.values[1].tolist() == result.returns[1].tolist() == [0, 0]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e19, 1e30])
def test_rewards_of_any_size_have_the_same_standardized_advantages(size):
    """The square of 1e30 is infinite in float32, and what is divided by it 0."""
    rewards = array([[0.0, 1.0, 3.0], [2.0, 2.0, 5.0]])
    for compare in (lambda r: grpo(r, epsilon=0.0), lambda r: grpo(r, scale="batch", epsilon=0.0), reinforce_pp_baseline):
        scale = 1.0 if compare is reinforce_pp_baseline and size < 1e-6 else size
        np.testing.assert_allclose(compare(rewards * scale).values, compare(rewards).values, rtol=1e-5, atol=1e-6)
