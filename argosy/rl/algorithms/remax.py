"""ReMax: Li et al. 2023, arXiv:2310.10505. The baseline is the reward of the prompt's greedy completion.

    A_i = r_i - r_greedy

One sampled completion per prompt is enough. A prompt is useless if all its sampled completions have the reward of the greedy one. If
the greedy completion has no reward, there is no baseline, and the prompt's completions count as missing; verl subtracts whatever is
there.
"""

from typing import TYPE_CHECKING

from argosy.rl.policy.settings import AdvantageName, Average, LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages


class ReMax(Policy):
    """REINFORCE with the greedy completion's reward as baseline (arXiv:2310.10505). One completion per prompt is enough."""

    advantages: AdvantageName = "remax"
    loss: LossName = "reinforce"
    average: Average = "sums"


def remax(rewards: "Float[Array, 'g n']", greedy: "Float[Array, 'g 1']") -> "Advantages":
    """Computes advantages relative to the reward of the greedy completion.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
        greedy: the reward of each prompt's greedy completion; NaN where missing.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import differ, groups

    of = groups(jnp.where(jnp.isfinite(greedy), rewards, jnp.nan))
    baseline = jnp.where(jnp.isfinite(greedy), greedy, 0.0)
    both = jnp.concatenate([of.rewards, baseline], 1)
    there = jnp.concatenate([of.scored, jnp.any(of.scored, 1, keepdims=True)], 1)
    return of._replace(useful=differ(both, there, 1)).advantages(of.rewards - baseline)
