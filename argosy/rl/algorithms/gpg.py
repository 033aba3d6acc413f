"""Group policy gradient (GPG): Chu et al. 2025, arXiv:2504.02546.

    A_i = alpha (r_i - mean(r)) / norm        alpha = groups / useful groups

Groups whose rewards are all equal shrink the gradient; alpha makes up for that. The paper uses norm = 1. The loss is plain REINFORCE
(`argosy.rl.algorithms.reinforce`), without ratio, clipping or reference.

Difference from verl: there alpha is completions / completions whose reward is not 0. So completions of a prompt that is always solved
count as useful there, and rewards of 0 and 1 give other updates than rewards of 1 and 2.
"""

from typing import TYPE_CHECKING

from argosy.rl.policy.settings import AdvantageName, Average, LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages


class GPG(Policy):
    """Group policy gradient (arXiv:2504.02546): REINFORCE over the mean of the group."""

    advantages: AdvantageName = "gpg"
    loss: LossName = "reinforce"
    average: Average = "tokens"


def gpg(rewards: "Float[Array, 'g n']", *, norm: float = 1.0) -> "Advantages":
    """Computes advantages relative to the mean of the group, scaled up to make up for useless groups.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import groups

    of = groups(rewards)
    alpha = len(rewards) / jnp.maximum(jnp.sum(of.useful.astype(rewards.dtype)), 1.0)
    return of.advantages(alpha * (of.rewards - of.mean) / norm)
