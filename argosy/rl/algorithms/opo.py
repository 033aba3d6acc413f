"""On-policy RL with optimal reward baseline (OPO): Hao et al. 2025, arXiv:2505.23585.

    b = (sum of l_i r_i) / (sum of l_i)      A_i = r_i - b

The baseline of least variance weighs rewards by the squared norm of the gradients; with gradients of tokens about orthogonal that is
the length l_i. The paper trains exactly on-policy: one update per batch of samples, without clipping, KL or entropy terms.

Difference from verl: a group of one completion gets the advantage 0 and counts as useless. In verl it gets its raw reward.
"""

from typing import TYPE_CHECKING

from argosy.rl.policy.settings import AdvantageName, Average, LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages


class OPO(Policy):
    """On-policy RL with the baseline of least variance (arXiv:2505.23585): one update per rollout, no clipping, no KL."""

    advantages: AdvantageName = "opo"
    loss: LossName = "reinforce"
    average: Average = "tokens"


def opo(rewards: "Float[Array, 'g n']", lengths: "Float[Array, 'g n']") -> "Advantages":
    """Computes advantages relative to the length-weighted mean of the group.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
        lengths: the number of tokens that the policy sampled in each completion.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import groups

    of = groups(rewards)
    weights = jnp.where(of.scored, lengths, 0.0)
    baseline = jnp.sum(weights * of.rewards, 1, keepdims=True) / jnp.maximum(jnp.sum(weights, 1, keepdims=True), 1.0)
    return of.advantages(of.rewards - baseline)
