"""Group policy gradient (GPG): Chu et al. 2025, arXiv:2504.02546.

    A_i = alpha (r_i - mean(r)) / norm        alpha = groups / useful groups

alpha undoes the shrinking of the gradient by groups whose rewards are all equal. norm is 1 in the paper's own choice. The loss is
plain REINFORCE (`argosy.rl.algorithms.reinforce`), without ratio, clipping or reference.

Difference from verl: its alpha is completions / completions whose reward is not 0, so right answers to a prompt that is always solved
count as useful there, and rewards of 0 and 1 train otherwise than rewards of 1 and 2.
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
    """Advantages over the mean of the group, scaled up by the share of groups that are useless.

    Args:
        rewards: NaN where missing.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import groups

    of = groups(rewards)
    alpha = len(rewards) / jnp.maximum(jnp.sum(of.useful.astype(rewards.dtype)), 1.0)
    return of.advantages(alpha * (of.rewards - of.mean) / norm)
