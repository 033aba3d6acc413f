"""Advantages of turns against loops in NumPy that follow the equations, turn by turn and answer by answer; and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from argosy.data.rows.prompts import Prompt
from argosy.rl.advantages.credit import RolloutRewards, rollout_advantages, useful_groups
from argosy.rl.advantages.gae import gae
from argosy.rl.advantages.totals import at_last
from argosy.rl.advantages.turns import TurnRewards, mixed, to_go
from argosy.rl.algorithms.grpo import GRPO, grpo
from argosy.rl.algorithms.ppo import PPO
from argosy.rl.algorithms.reinforce_pp import ReinforcePP
from argosy.rl.algorithms.rloo import RLOO
from argosy.rl.policy.settings import Critic, Policy
from argosy.rl.rollouts.completions import Episode, Trajectory
from argosy.rl.rollouts.episodes.turn_rewards import episode_turns

G, N, K, L = 3, 4, 5, 24
EPSILON = 1e-6


def random_turns(seed: int = 0) -> TurnRewards:
    """Answers of 0 to 5 turns; one without any reward; in the last group nothing differs."""
    rng = np.random.default_rng(seed)
    rewards, outcome = rng.normal(0, 1, (G, N, K)), rng.normal(0, 1, (G, N))
    turn_counts = rng.integers(1, K + 1, (G, N))
    turn_counts[0, 0], turn_counts[0, 1] = 0, K
    outcome[1, 2] = np.nan
    rewards[2], outcome[2], turn_counts[2] = 0.5, 0.25, 3
    return TurnRewards(jnp.asarray(rewards, jnp.float32), jnp.asarray(outcome, jnp.float32), jnp.asarray(turn_counts, jnp.int32))


def compare(values_by_answer: dict, scale: str, pooled: float) -> dict:
    """GRPO's comparison of some numbers by answer."""
    values = np.array(list(values_by_answer.values()))
    if len(values) < 2 or np.ptp(values) < 1e-6:
        return dict.fromkeys(values_by_answer, 0.0)
    by = {"group": values.std(ddof=1) + EPSILON, "batch": pooled + EPSILON, "none": 1.0}[scale]
    return {i: (value - values.mean()) / by for i, value in values_by_answer.items()}


def pooled_std(many: list[dict]) -> float:
    return np.std([value for values_by_answer in many for value in values_by_answer.values()], ddof=1)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reward_to_go(gamma: float, scale: str):
    of = random_turns()
    rewards, outcome, turn_counts = (np.asarray(a, np.float64) for a in of)
    returns: dict = {}
    for g in range(G):
        for i in range(N):
            for k in range(int(turn_counts[g, i])):
                if np.isfinite(outcome[g, i]):
                    later = range(k, int(turn_counts[g, i]))
                    reward_to_go = sum(gamma ** (turn - k) * rewards[g, i, turn] for turn in later)
                    returns.setdefault((g, k), {})[i] = reward_to_go + gamma ** (turn_counts[g, i] - 1 - k) * outcome[g, i]
    expected = np.zeros((G, N, K))
    for (g, k), returns_of_turn in returns.items():
        for i, value in compare(returns_of_turn, scale, pooled_std(list(returns.values()))).items():
            expected[g, i, k] = value
    advantages = to_go(of, gamma=gamma, scale=scale)
    np.testing.assert_allclose(advantages.values, expected, rtol=2e-5, atol=2e-5)
    assert np.abs(expected[:2]).max() > 0.5
    assert np.asarray(advantages.useful)[:, 0].tolist() == [True, True, False]
    alone = [group for group in returns.values() if len(group) < 2]
    equal = [group for group in returns.values() if len(group) > 1 and np.ptp(list(group.values())) < 1e-6]
    assert float(advantages.metrics["turns/useless"].value()) == pytest.approx((len(alone) + len(equal)) / len(returns))
    stds = [np.std(list(group.values()), ddof=1) for group in returns.values() if len(group) > 1]
    assert float(advantages.metrics["turns/reward_std"].value()) == pytest.approx(np.mean(stds), rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_turn_and_outcome_mixed(weight: float, scale: str):
    of = random_turns(1)
    rewards, outcome, turn_counts = (np.asarray(a, np.float64) for a in of)
    whole: list[dict] = [{} for _ in range(G)]
    turns: dict = {}
    for g in range(G):
        for i in range(N):
            if np.isfinite(outcome[g, i]):
                last = int(turn_counts[g, i]) - 1
                whole[g][i] = outcome[g, i] + (rewards[g, i, last] if last >= 0 else 0)
                for k in range(last):
                    turns.setdefault((g, k), {})[i] = rewards[g, i, k]
    expected = np.zeros((G, N, K))
    for g in range(G):
        for i, value in compare(whole[g], scale, pooled_std(whole)).items():
            expected[g, i, : int(turn_counts[g, i])] += value
    for (g, k), turn_values in turns.items():
        for i, value in compare(turn_values, scale, pooled_std(list(turns.values()))).items():
            expected[g, i, k] += weight * value
    advantages = mixed(of, weight=weight, scale=scale)
    np.testing.assert_allclose(advantages.values, expected, rtol=2e-5, atol=2e-5)
    assert np.asarray(advantages.useful)[:, 0].tolist() == [True, True, False]


def test_two_turns_by_hand_as_in_mt_grpo():
    """The turn: 1, 0; the outcome, of the last turn and of a function: 0, 3. Two answers, so each std is |difference| / sqrt 2."""
    of = TurnRewards(jnp.asarray([[[1.0, 0.0], [0.0, 1.0]]]), jnp.asarray([[0.0, 2.0]]), jnp.asarray([[2, 2]]))
    advantages = mixed(of, weight=0.5)
    unit = 2**-0.5
    np.testing.assert_allclose(advantages.values, [[[-unit + 0.5 * unit, -unit], [unit - 0.5 * unit, unit]]], rtol=1e-5)
    np.testing.assert_allclose(to_go(of).values, [[[-unit, -unit], [unit, unit]]], rtol=1e-5)


@pytest.mark.parametrize("estimator", [to_go, mixed])
def test_a_reward_at_the_end_alone_is_grpo(estimator):
    rewards = np.random.default_rng(2).normal(0, 1, (G, N)).astype(np.float32)
    of = TurnRewards(jnp.zeros((G, N, K)), jnp.asarray(rewards), jnp.full((G, N), 3))
    values = np.asarray(estimator(of).values)
    np.testing.assert_allclose(values[..., :3], np.repeat(np.asarray(grpo(jnp.asarray(rewards)).values)[..., None], 3, -1), rtol=1e-6)
    assert (values[..., 3:] == 0).all()


def test_equal_sums_that_were_earned_at_other_turns_teach():
    of = TurnRewards(jnp.asarray([[[1.0, 0.0], [0.0, 1.0]]]), jnp.zeros((1, 2)), jnp.full((1, 2), 2))
    advantages = to_go(of)
    assert np.asarray(advantages.values)[0, :, 0].tolist() == [0, 0], "both turns of both answers are followed by the same"
    assert np.asarray(advantages.values)[0, :, 1] == pytest.approx([-(2**-0.5), 2**-0.5], rel=1e-5)
    assert bool(advantages.useful[0, 0])


# ---- from answers to tokens


def answer(turns: list[tuple[int, float | None]], observed: int = 2, **episode_fields) -> Trajectory:
    """An answer of turns of so many tokens with these rewards; the environment says something before each of them."""
    live, starts = [], []
    for tokens, _ in turns:
        live += [False] * observed
        starts.append(len(live))
        live += [True] * tokens
    rewards = [reward for _, reward in turns]
    there = [reward for reward in rewards if reward is not None]
    played = Episode(rewards=rewards, starts=starts, turn_count=len(turns), reward=sum(there) if there else None, **episode_fields)
    return Trajectory(Prompt("a", [1], {}, ""), [1] * len(live), live, [0.0] * len(live), True, "", played)


ANSWERS = [answer([(2, 1.0), (3, None), (1, 0.5)]), answer([(1, 0.0)], observed=0), answer([(4, 0.5), (2, 2.0)]),
           answer([(2, 1.0), (2, 1.0)], observed=0)]  # fmt: skip


def judgment(functions: bool = True) -> RolloutRewards:
    """Two groups of two answers; the environment's rewards count double, and functions' beside them."""
    live = np.zeros((4, L), np.float32)
    for row, trajectory in enumerate(ANSWERS):
        live[row, : len(trajectory.live)] = trajectory.live
    sums = np.array([[trajectory.played.reward] for trajectory in ANSWERS], np.float32)
    function_rewards = np.array([[0.25], [np.nan], [-1.0], [1.0]], np.float32)
    rewards = np.concatenate([sums, function_rewards], 1)[:, : 2 if functions else 1].reshape(2, 2, -1)
    return RolloutRewards(rewards, (2.0, 1.0)[: 2 if functions else 1], live, turns=episode_turns(ANSWERS, K, L))


def test_turns_of_tokens():
    turns = episode_turns(ANSWERS, K, L)
    assert turns.turn_count.tolist() == [3, 1, 2, 2]
    assert turns.rewards[:, :3].tolist() == [[1, 0, 0.5], [0, 0, 0], [0.5, 2, 0], [1, 1, 0]]
    assert turns.is_rewarded[:2, :3].tolist() == [[True, False, True], [True, False, False]]
    live = judgment().live
    by_token = turns.of_tokens(np.arange(1.0, 21).reshape(4, K), live)
    assert by_token[0, :13].tolist() == [0, 0, 1, 1, 0, 0, 2, 2, 2, 0, 0, 3, 0]
    assert by_token[3, :5].tolist() == [16, 16, 17, 17, 0], "two turns without a word between them"
    assert turns.at_ends(np.arange(1.0, 21).reshape(4, K), live)[3, :5].tolist() == [0, 16, 0, 17, 0]
    assert turns.at_ends(np.arange(1.0, 21).reshape(4, K), live).sum(1).tolist() == [6, 6, 23, 33]
    assert turns.sums(live).tolist() == [[2, 3, 1, 0, 0], [1, 0, 0, 0, 0], [4, 2, 0, 0, 0], [2, 2, 0, 0, 0]]


@pytest.mark.parametrize(
    "policy", [GRPO(credit={"by": "to_go", "gamma": 0.9}), GRPO(credit={"by": "mixed", "weight": 2}, scale="none")]
)
@pytest.mark.parametrize("functions", [True, False])
def test_a_policy_credits_turns(policy: Policy, functions: bool):
    of = judgment(functions)
    outcome = np.array([0.25, 0, -1, 1] if functions else [0, 0, 0, 0], np.float32).reshape(2, 2)
    rewards = 2 * np.array([[1, 0, 0.5], [0, 0, 0], [0.5, 2, 0], [1, 1, 0]], np.float32).reshape(2, 2, 3)
    of_turns = TurnRewards(jnp.asarray(rewards), jnp.asarray(outcome), jnp.asarray([[3, 1], [2, 2]]))
    by_hand = to_go(of_turns, gamma=0.9) if policy.credit.by == "to_go" else mixed(of_turns, weight=2.0, scale="none")
    values = np.asarray(by_hand.values).reshape(4, 3)
    advantages = rollout_advantages(policy, of)
    assert advantages.turns is not None
    np.testing.assert_allclose(advantages.turns[:, :3], values, rtol=1e-5, atol=1e-6)
    for row, trajectory in enumerate(ANSWERS):
        row_values = advantages.values[row][of.live[row] > 0]
        expected = np.concatenate([[values[row, turn]] * int(tokens) for turn, tokens in enumerate(of.turns.sums(of.live)[row, :3])])
        np.testing.assert_allclose(row_values, expected, rtol=1e-5, atol=1e-6)
        assert (advantages.values[row][of.live[row] == 0] == 0).all(), trajectory
    assert advantages.counted.all()
    assert useful_groups(policy, of).tolist() == advantages.useful.tolist() == [True, True]
    assert float(advantages.metrics["groups/useless"].value()) == 0


def test_an_answer_without_any_reward_takes_no_part():
    """The other one of its group is then alone."""
    of = judgment()
    of.rewards[0, 1] = np.nan
    advantages = rollout_advantages(GRPO(credit={"by": "to_go"}), of)
    assert advantages.counted.tolist() == [True, False, True, True]
    assert (advantages.values[:2] == 0).all()
    assert advantages.useful.tolist() == [False, True]
    assert (float(advantages.metrics["rewards/missing"].value()), float(advantages.metrics["groups/useless"].value())) == (0.25, 0.5)


def test_equal_sums_are_resampled_by_the_sum_and_not_by_turns():
    answers = [answer([(1, 1.0), (1, 0.0)]), answer([(1, 0.0), (1, 1.0)])]
    live = np.array([[*trajectory.live, False] for trajectory in answers], np.float32)
    of = RolloutRewards(np.ones((1, 2, 1), np.float32), (1.0,), live, turns=episode_turns(answers, 2, live.shape[1]))
    assert useful_groups(GRPO(credit={"by": "to_go"}), of).tolist() == [True]
    assert useful_groups(GRPO(), of._replace(turns=None)).tolist() == [False]


def test_a_penalty_is_one_of_its_turn():
    """As if the environment had taken it from the reward of the turn."""
    of = judgment()
    penalty = np.random.default_rng(4).normal(0, 1, of.live.shape).astype(np.float32)
    less = of.turns.sums(np.where(of.live > 0, penalty, 0)) / 2
    reduced = of._replace(turns=type(of.turns)(of.turns.rewards - less, of.turns.is_rewarded, of.turns.turn_count, of.turns.number))
    policy = GRPO(credit={"by": "to_go"}, kl=0.1, kl_in="reward")
    advantages, same = rollout_advantages(policy, of._replace(penalty=penalty)), rollout_advantages(policy, reduced)
    np.testing.assert_allclose(advantages.values, same.values, rtol=1e-4, atol=1e-5)
    assert np.abs(advantages.values - rollout_advantages(policy, of).values).max() > 0.1
    assert float(advantages.metrics["reward"].value()) == float(rollout_advantages(policy, of).metrics["reward"].value()), "as it came"


def test_a_critic_sees_rewards_at_the_end_of_their_turns():
    of = judgment()
    values = np.random.default_rng(5).normal(0, 1, of.live.shape).astype(np.float32)
    of = of._replace(values=values, after=np.zeros(4, np.float32))
    rewards = np.zeros_like(of.live)
    for row, (trajectory, extra) in enumerate(zip(ANSWERS, (0.25, 0, -1, 1))):
        ends = [start + length - 1 for start, length in zip(trajectory.played.starts, of.turns.sums(of.live)[row].astype(int))]
        for place, reward in zip(ends, trajectory.played.rewards):
            rewards[row, place] += 2 * (reward or 0)
        rewards[row, ends[-1]] += extra
    policy = PPO(credit={"by": "to_go"}, critic=Critic(gamma=0.9))
    expected = gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(of.live), jnp.zeros(4), gamma=0.9, lam=0.95)
    advantages = rollout_advantages(policy, of)
    np.testing.assert_allclose(advantages.values, expected.values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantages.returns, expected.returns, rtol=1e-5, atol=1e-6)
    sums = jnp.asarray(rewards.sum(1))
    plain = gae(at_last(sums, jnp.asarray(of.live)), jnp.asarray(values), jnp.asarray(of.live), jnp.zeros(4), gamma=0.9, lam=0.95)
    by_answer = rollout_advantages(PPO(critic=Critic(gamma=0.9)), of._replace(turns=None))
    np.testing.assert_allclose(by_answer.values, plain.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "settings", "problem"),
    [
        (RLOO, {"credit": {"by": "to_go"}}, "rloo needs one reward an answer"),
        (ReinforcePP, {"credit": {"by": "mixed"}}, "reinforce_pp needs one reward an answer"),
        (PPO, {"credit": {"by": "mixed"}}, "not with a critic: credit.by=to_go does"),
        (PPO, {"credit": {"by": "to_go", "gamma": 0.9}}, "credit.gamma = 0.9 does not apply: with a critic it is critic.gamma"),
        (GRPO, {"credit": {"by": "to_go"}, "normalize": "each"}, "normalize=each compares one number an answer"),
        (GRPO, {"credit": {"by": "to_go", "weight": 2}}, "weight = 2 does not apply: it is for by=mixed, not to_go"),
        (GRPO, {"credit": {"gamma": 0.9}}, "gamma = 0.9 does not apply: it is for by=to_go, not answer"),
        (GRPO, {"credit": {"by": "turns"}}, "answer"),
    ],
)
def test_what_turns_do_not_apply_to_is_refused(policy: type[Policy], settings: dict, problem: str):
    with pytest.raises(ValidationError, match=problem):
        policy(**settings)
