"""From the rewards of a rollout to the advantage of every token, by the policy's settings (`rl.algorithms`).

Advantages are computed once over all completions of a rollout, because they compare completions with each other. They are computed on
the host: the arrays are small.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.rl.advantages.gae import gae
from argosy.rl.advantages.groups import Advantages, TokenAdvantages, groups
from argosy.rl.advantages.totals import at_last, total
from argosy.rl.advantages.turns import TurnAdvantages, TurnRewards, mixed, to_go, useless
from argosy.rl.algorithms import ADVANTAGES
from argosy.rl.algorithms.gdpo import gdpo
from argosy.rl.policy.calls import call_with, parameter_names
from argosy.rl.policy.metrics import Metrics
from argosy.rl.policy.settings import Critic, Policy
from argosy.rl.rollouts.episodes.turn_rewards import EpisodeTurns


class RolloutAdvantages(NamedTuple):
    """The advantages of a rollout.

    values: [B L], the advantage of each token; 0 where there is no token.
    counted: [B], whether the completion takes part in the loss.
    useful: [g], whether the group can be learned from.
    metrics: the metrics of the rollout's rewards and advantages.
    returns: [B L], the returns that the critic learns; None without a critic.
    turns: [B K], the advantage of each turn; None unless turns are credited one by one.
    """

    values: np.ndarray
    counted: np.ndarray
    useful: np.ndarray
    metrics: Metrics
    returns: np.ndarray | None = None
    turns: np.ndarray | None = None


class RolloutRewards(NamedTuple):
    """The inputs of advantages, for a rollout of g groups of n completions; B = g n, in the same order.

    rewards: [g n k], k rewards of each completion; NaN where one is missing.
    weights: the weights of the k rewards.
    live: [B L], 1 for tokens that the policy sampled, 0 for others.
    greedy: [g k], the rewards of greedy completions, for `advantages: remax`.
    penalty: [B L], the KL penalty to subtract from the reward at each token.
    values: [B L], the critic's value before each token.
    after: [B], the critic's value after the last token of completions that were cut; 0 for others.
    turns: the rewards and tokens of each turn, if turns are credited one by one. The first of the k rewards is then the sum of the
        rewards of all turns.
    """

    rewards: np.ndarray
    weights: Sequence[float]
    live: np.ndarray
    greedy: np.ndarray | None = None
    penalty: np.ndarray | None = None
    values: np.ndarray | None = None
    after: np.ndarray | None = None
    turns: EpisodeTurns | None = None


def rollout_advantages(policy: Policy, of: RolloutRewards) -> RolloutAdvantages:
    """Computes the advantages of a rollout as the policy's settings say: against a critic, by turn, or against other completions."""
    summed, mask = total(jnp.asarray(of.rewards), of.weights), jnp.asarray(of.live)
    penalty = None if of.penalty is None else jnp.where(mask > 0, jnp.asarray(of.penalty), 0.0)
    if policy.critic is not None:
        return against_critic(policy.critic, of, summed, mask, penalty)
    if of.turns is not None:
        return of_turns(policy, of, of.turns, summed, penalty)
    # The metrics are of the rewards as they came.
    plain = groups(summed).advantages(jnp.zeros_like(summed))
    advantages = advantages_of(policy, of, summed, mask, penalty)
    if isinstance(advantages, TokenAdvantages):
        return RolloutAdvantages(np.asarray(advantages.values), _flattened(plain.scored), np.ones(len(summed), bool), plain.metrics)
    rows, counted = advantages.rows(mask)
    values, metrics = np.asarray(jnp.where(counted > 0, rows, 0.0)), advantages.metrics | plain.metrics
    return RolloutAdvantages(values, _flattened(advantages.scored), _flattened(advantages.useful), metrics)


def advantages_of(
    policy: Policy, of: RolloutRewards, summed: Array, mask: Array, penalty: Array | None
) -> Advantages | TokenAdvantages:
    """Computes advantages with the function that the policy's setting `advantages` names (`rl.algorithms`).

    Args:
        summed: [g n], the weighted sum of each completion's rewards.
        mask: [B L], 1 for tokens that the policy sampled.
        penalty: [B L], the KL penalty of each token.
    """
    if policy.normalize == "each":
        return gdpo(jnp.asarray(of.rewards), of.weights)
    function = ADVANTAGES[policy.comparison]
    if penalty is not None and "penalty" not in parameter_names(function):
        summed = summed - jnp.sum(penalty, 1).reshape(summed.shape)
    offers = {"rewards": summed, "mask": mask, "penalty": penalty, "scale": policy.scale}
    offers["lengths"] = jnp.sum(mask, 1).reshape(summed.shape)
    if of.greedy is not None:
        offers["greedy"] = total(jnp.asarray(of.greedy)[:, None], of.weights)
    return call_with(function, **offers)


def of_turns(policy: Policy, of: RolloutRewards, turns: EpisodeTurns, summed: Array, penalty: Array | None) -> RolloutAdvantages:
    """Computes the advantage of each turn, and repeats it for all tokens of the turn."""
    plain = groups(summed).advantages(jnp.zeros_like(summed))
    advantages = turn_advantages(policy, of, turns, penalty)
    values = np.asarray(advantages.values).reshape(turns.rewards.shape)
    metrics = plain.metrics | advantages.metrics | useless(advantages)
    scored, useful = _flattened(plain.scored), _flattened(advantages.useful)
    return RolloutAdvantages(turns.of_tokens(values, of.live), scored, useful, metrics, turns=values)


def turn_advantages(policy: Policy, of: RolloutRewards, turns: EpisodeTurns, penalty: Array | None = None) -> TurnAdvantages:
    """Computes the advantage of each turn by the policy's setting `credit`. The penalties of a turn's tokens are summed and subtracted
    from the reward of the turn."""
    g, n = of.rewards.shape[:2]
    rewards = rewards_of_turns(of, turns) - (0.0 if penalty is None else turns.sums(np.asarray(penalty)))
    rewarded = TurnRewards(jnp.asarray(rewards).reshape(g, n, -1), outcome(of), jnp.asarray(turns.turn_count).reshape(g, n))
    if policy.credit.by == "mixed":
        return mixed(rewarded, weight=policy.credit.weight, scale=policy.scale)
    return to_go(rewarded, gamma=policy.credit.gamma, scale=policy.scale)


def rewards_of_turns(of: RolloutRewards, turns: EpisodeTurns) -> np.ndarray:
    """Returns the environment's reward of each turn, times its weight, [B K]."""
    return np.float32(of.weights[0]) * turns.rewards


def outcome(of: RolloutRewards) -> Array:
    """Returns the reward of each whole completion [g n], the weighted sum without the environment's reward. It is NaN for a completion
    without any reward."""
    scored = jnp.isfinite(jnp.asarray(of.rewards)).any(-1)
    if of.rewards.shape[-1] == 1:
        return jnp.where(scored, 0.0, jnp.nan)
    rest = total(jnp.asarray(of.rewards[..., 1:]), of.weights[1:])
    return jnp.where(scored, jnp.where(jnp.isfinite(rest), rest, 0.0), jnp.nan)


def useful_groups(policy: Policy, of: RolloutRewards) -> np.ndarray:
    """Whether each group can be learned from [g], by its rewards alone."""
    if of.turns is not None and policy.critic is None:
        return _flattened(turn_advantages(policy, of, of.turns).useful)
    return _flattened(groups(total(jnp.asarray(of.rewards), of.weights)).useful)


def against_critic(critic: Critic, of: RolloutRewards, summed: Array, mask: Array, penalty: Array | None) -> RolloutAdvantages:
    """Computes the advantage of each token relative to a critic's values. Every group counts as useful, because completions of a group
    are not compared.

    Args:
        summed: [g n], the weighted sum of each completion's rewards.
        mask: [B L], 1 for tokens that the policy sampled.
        penalty: [B L], the KL penalty of each token.
    """
    plain = groups(summed).advantages(jnp.zeros_like(summed))
    assert of.values is not None
    rewards = at_last((summed if of.turns is None else outcome(of)).reshape(-1), mask)
    if of.turns is not None:
        rewards = rewards + of.turns.at_ends(rewards_of_turns(of, of.turns), of.live)
    rewards = rewards - (0.0 if penalty is None else penalty)
    after = None if of.after is None else jnp.asarray(of.after)
    advantages = gae(rewards, jnp.asarray(of.values), mask, after, gamma=critic.gamma, lam=critic.lam)
    every = np.ones(len(summed), bool)
    values, returns = np.asarray(advantages.values), np.asarray(advantages.returns)
    return RolloutAdvantages(values, _flattened(plain.scored), every, plain.metrics, returns)


def _flattened(a: Array) -> np.ndarray:
    return np.asarray(a).reshape(-1)
