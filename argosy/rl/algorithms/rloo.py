"""REINFORCE leave-one-out (RLOO): Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.

    A_i = r_i - (sum of r_j, j != i) / (n - 1)

A completion's baseline does not contain its own reward, so the gradient is unbiased. A_i is n / (n - 1) times GRPO's advantage without
the division by the std.

Differences from TRL 1.16: a group with one reward gets the advantage 0 and counts as useless; TRL computes 0 / 0 and replaces it. TRL's
RLOO has the product of a sequence's ratios in its loss; here the loss is a separate choice (`argosy.rl.policy.token_losses`).
"""

from typing import TYPE_CHECKING, Literal

from argosy.rl.policy.settings import AdvantageName, Average, LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages


class RLOO(Policy):
    """REINFORCE with the mean of the other completions as baseline (arXiv:2402.14740)."""

    kl_in: Literal["loss", "reward"] = "reward"
    advantages: AdvantageName = "rloo"
    loss: LossName = "reinforce"
    average: Average = "sums"


def rloo(rewards: "Float[Array, 'g n']") -> "Advantages":
    """Computes advantages relative to the mean of the group's other completions.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import groups

    of = groups(rewards)
    others = jnp.sum(of.rewards, 1, keepdims=True) - of.rewards
    return of.advantages(of.rewards - others / jnp.maximum(of.size - 1, 1.0))
