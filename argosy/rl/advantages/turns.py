"""Advantages of turns: each turn is credited with the rewards that follow it, and compared with the same turn of its prompt's other
completions.

    r_ik   reward of turn k of completion i        O_i   reward of the whole completion        K_i   number of turns

    reward to go   G_ik = sum over l >= k of gamma^(l - k) r_il + gamma^(K_i - k) O_i            A_ik = norm_k(G_ik)
    mixed          A_ik = norm(O_i + r_iK) + weight norm_k(r_ik) for k < K_i                     A_iK = norm(O_i + r_iK)

norm_k is GRPO's comparison (`argosy.rl.algorithms.grpo`) over those completions of the group that have a turn k; norm is the same over
the whole group.

- Reward to go: a turn cannot change earlier rewards, so leaving them out removes variance and no signal. Normalized returns of turns
  are the advantages of GTPO (arXiv:2511.14846). GiGPO (arXiv:2505.10978) compares such returns among steps from the same state. Here
  the turn's number stands for the state. That is exact for the first turn and coarser than GiGPO's state after it, but no state has to
  occur twice.
- Mixed: MT-GRPO (arXiv:2505.11821). All turns get the advantage of the outcome, and each turn but the last also that of its own reward.
  For two turns and weight 1 this is the paper's. For more turns the paper branches a tree of completions at each turn; here each
  completion is sampled once.

A turn that only one completion has reached, or at which all rewards are equal, teaches nothing: its advantage is 0. A turn's reward of
None counts as 0 if the completion has some reward. If all completions have the same number of turns, only last turns are rewarded and
gamma = 1, both variants give GRPO's advantages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.rl.advantages.groups import groups, share_where
from argosy.rl.algorithms.grpo import grpo
from argosy.rl.policy.metrics import Metrics, mean_where
from argosy.rl.policy.settings import Scale


class TurnAdvantages(NamedTuple):
    """The advantages of turns.

    values: the advantage of each turn; 0 where there is no turn, where the completion has no reward, and where all rewards are equal.
    useful: whether an advantage of the group can differ from 0.
    metrics: metrics of the comparison of turns.
    """

    values: Float[Array, "g n K"]
    useful: Bool[Array, "g 1"]
    metrics: Metrics


class TurnRewards(NamedTuple):
    """The rewards of completions by turn.

    rewards: the reward of each turn.
    outcome: the reward of each whole completion; NaN for a completion without any reward.
    turn_count: the number of turns of each completion.
    """

    rewards: Float[Array, "g n K"]
    outcome: Float[Array, "g n"]
    turn_count: Int[Array, "g n"]

    @property
    def number(self) -> Int[Array, "K"]:  # noqa: F821
        return jnp.arange(self.rewards.shape[-1])

    @property
    def scored(self) -> Bool[Array, "g n"]:
        return jnp.isfinite(self.outcome)

    @property
    def there(self) -> Bool[Array, "g n K"]:
        """Whether a turn exists and its completion has a reward."""
        return self.scored[..., None] & (self.number < self.turn_count[..., None])

    @property
    def last(self) -> Bool[Array, "g n K"]:
        return self.there & (self.number == self.turn_count[..., None] - 1)

    @property
    def turn_rewards(self) -> Float[Array, "g n K"]:
        """The rewards of turns, 0 where there is no turn or no reward."""
        return jnp.where(self.there, self.rewards, 0.0)

    def whole(self) -> Float[Array, "g n K"]:
        """Returns the rewards of turns, with the reward of the whole completion added to the last turn."""
        return self.turn_rewards + jnp.where(self.last, self.outcome[..., None], 0.0)


def to_go(of: TurnRewards, *, gamma: float = 1.0, scale: Scale = "group") -> TurnAdvantages:
    """Computes the advantage of each turn from its discounted reward to go, relative to the same turn of the group's other completions.

    Args:
        gamma: the discount per turn.
        scale: the divisor of the differences. `group`: the standard deviation of the group at the turn. `batch`: the standard deviation
            over all turns of all completions. `none`: no division (Dr. GRPO, arXiv:2503.20783).
    """
    start = jnp.zeros_like(of.outcome), jnp.asarray(gamma, of.rewards.dtype)
    returns = jnp.moveaxis(jax.lax.scan(_back, start, jnp.moveaxis(of.whole(), -1, 0), reverse=True)[1], 0, -1)
    values, useful, metrics = at_turns(returns, of.there, scale)
    return TurnAdvantages(values, jnp.any(useful, -1, keepdims=True), metrics)


def _back(carry: tuple[Array, Array], reward: Array) -> tuple[tuple[Array, Array], Array]:
    following, gamma = carry
    here = reward + gamma * following
    return (here, gamma), here


def mixed(of: TurnRewards, *, weight: float = 1.0, scale: Scale = "group") -> TurnAdvantages:
    """Computes the advantage of each turn as a sum of two advantages. The first compares the whole completion with its group. The
    second compares the turn's own reward with the same turn of the other completions; the last turn does not have it.

    Args:
        weight: the weight of the second advantage in the sum.
        scale: the divisor of the differences in both advantages, as in `to_go`.
    """
    end = jnp.sum(jnp.where(of.last, of.rewards, 0.0), -1)
    whole = grpo(of.outcome + end, scale=scale)
    turns, useful, metrics = at_turns(of.turn_rewards, of.there & ~of.last, scale)
    values = jnp.where(of.there, whole.values[..., None] + weight * turns, 0.0)
    return TurnAdvantages(values, whole.useful | jnp.any(useful, -1, keepdims=True), metrics)


def at_turns(
    values: Float[Array, "g n K"], there: Bool[Array, "g n K"], scale: Scale
) -> tuple[Float[Array, "g n K"], Bool[Array, "g K"], Metrics]:
    """Compares the values of each turn within the group.

    Args:
        values: a number for each turn.
        there: whether the turn exists.

    Returns:
        The advantage of each turn, whether each group can be learned from at each turn, and metrics.
    """
    g, n, turns = values.shape
    flat = jnp.moveaxis(jnp.where(there, values, jnp.nan), -1, 1).reshape(g * turns, n)
    advantages, of = grpo(flat, scale=scale), groups(flat)
    reached, several = (of.size[:, 0] > least for least in (0, 1))
    metrics: Metrics = {
        "turns/useless": mean_where(1.0 - of.useful[:, 0].astype(values.dtype), reached.astype(values.dtype)),
        "turns/reward_std": mean_where(of.std[:, 0], several.astype(values.dtype)),
    }
    return jnp.moveaxis(advantages.values.reshape(g, turns, n), 1, -1), advantages.useful.reshape(g, turns), metrics


def useless(of: TurnAdvantages) -> Metrics:
    """Returns a metric, the share of groups that cannot be learned from at any turn."""
    return {"groups/useless": share_where(~of.useful, of.values.dtype)}
