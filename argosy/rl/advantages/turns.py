"""Advantages of turns: each turn is credited with what came of it, and compared with the same turn of the other answers to its prompt.

    r_ik   the reward of turn k of answer i        O_i   what rewards the whole answer        K_i   turns of answer i

    reward to go   G_ik = sum over l >= k of gamma^(l - k) r_il + gamma^(K_i - k) O_i            A_ik = norm_k(G_ik)
    mixed          A_ik = norm(O_i + r_iK) + weight norm_k(r_ik) for k < K_i                     A_iK = norm(O_i + r_iK)

norm_k is GRPO's comparison (`argosy.rl.algorithms.grpo`) over those answers of the group that have a turn k; norm that over the group.

- Reward to go: a turn cannot change what was rewarded before it, so leaving that out removes variance and no signal. Normalized returns
  of turns are the advantages of GTPO (arXiv:2511.14846). GiGPO (arXiv:2505.10978) compares such returns among steps from the same
  state. Here the turn's number stands for the state: exact for the first turn, and coarser than GiGPO's after it, but no state has to
  occur twice.
- Mixed: MT-GRPO (arXiv:2505.11821), the advantage of the outcome for all turns, and for each but the last one that of its own reward.
  For two turns and weight 1 it is the paper's. For more turns the paper branches a tree of answers at each turn; here each answer is
  sampled once.

A turn that one answer alone has reached, or at which all are equal, teaches nothing: its advantage is 0. A reward of None is 0 in an
answer that has some reward. With gamma = 1 and rewards at the last turns alone, and as many turns each, both give GRPO's advantages.
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
    """The advantages of turns. values: 0 where there is no turn, where the answer has no reward, and where nothing is taught.
    useful: at least one advantage of the group can differ from 0."""

    values: Float[Array, "g n K"]
    useful: Bool[Array, "g 1"]
    metrics: Metrics


class TurnRewards(NamedTuple):
    """The rewards of answers by turn.

    rewards: of each turn.
    outcome: of the whole answer; NaN: the answer has no reward at all.
    turn_count: how many turns there are.
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
        """The turns of answers that have a reward."""
        return self.scored[..., None] & (self.number < self.turn_count[..., None])

    @property
    def last(self) -> Bool[Array, "g n K"]:
        return self.there & (self.number == self.turn_count[..., None] - 1)

    @property
    def turn_rewards(self) -> Float[Array, "g n K"]:
        """The rewards of turns, 0 where there is none."""
        return jnp.where(self.there, self.rewards, 0.0)

    def whole(self) -> Float[Array, "g n K"]:
        """The rewards of turns, with what rewards the whole answer at its last one."""
        return self.turn_rewards + jnp.where(self.last, self.outcome[..., None], 0.0)


def to_go(of: TurnRewards, *, gamma: float = 1.0, scale: Scale = "group") -> TurnAdvantages:
    """The discounted reward from each turn on, against that of the others of its group at the same turn.

    Args:
        gamma: the discount for each turn that a reward is away.
        scale: what differences are divided by: the standard deviation of the group at the turn, that of all turns of all answers
            (batch), or nothing (Dr. GRPO, arXiv:2503.20783).
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
    """The outcome of the answer against its group, and beside it the reward of each turn but the last against the same turn.

    Args:
        weight: of the turn's part.
        scale: as in `to_go`, of both parts.
    """
    end = jnp.sum(jnp.where(of.last, of.rewards, 0.0), -1)
    whole = grpo(of.outcome + end, scale=scale)
    turns, useful, metrics = at_turns(of.turn_rewards, of.there & ~of.last, scale)
    values = jnp.where(of.there, whole.values[..., None] + weight * turns, 0.0)
    return TurnAdvantages(values, whole.useful | jnp.any(useful, -1, keepdims=True), metrics)


def at_turns(
    values: Float[Array, "g n K"], there: Bool[Array, "g n K"], scale: Scale
) -> tuple[Float[Array, "g n K"], Bool[Array, "g K"], Metrics]:
    """Values compared with those of the same group at the same turn, and which of these can be learned from."""
    g, n, turns = values.shape
    flat = jnp.moveaxis(jnp.where(there, values, jnp.nan), -1, 1).reshape(g * turns, n)
    found, of = grpo(flat, scale=scale), groups(flat)
    reached, several = (of.size[:, 0] > least for least in (0, 1))
    metrics: Metrics = {
        "turns/useless": mean_where(1.0 - of.useful[:, 0].astype(values.dtype), reached.astype(values.dtype)),
        "turns/reward_std": mean_where(of.std[:, 0], several.astype(values.dtype)),
    }
    return jnp.moveaxis(found.values.reshape(g, turns, n), 1, -1), found.useful.reshape(g, turns), metrics


def useless(of: TurnAdvantages) -> Metrics:
    """The share of groups at none of whose turns there is anything to learn."""
    return {"groups/useless": share_where(~of.useful, of.values.dtype)}
