"""Several rewards, each normalized within its group before the weighted sum (GDPO): arXiv:2601.05242.

    A_ik = (r_ik - mean_k) / (std_k + epsilon)      S_i = sum of w_k A_ik      A_i = (S_i - mean(S)) / (std(S) + epsilon)

mean_k and std_k are over the completions of a prompt, mean(S) and std(S) over the batch. Normalizing the sum instead (GRPO of
`argosy.rl.advantages.totals.total`) makes (1, 0) and (0, 1) the same answer and lets the reward of the widest range decide.

A group is useless if each of its rewards is. Differences from TRL 1.16 ("normalize_then_sum"): epsilon is 1e-6 instead of 1e-4, and
equal rewards give exact zeros (see `argosy.rl.advantages.groups`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.advantages.groups import Advantages, deviation, groups, standardize
from argosy.rl.advantages.totals import reward_weights, total


def gdpo(rewards: Float[Array, "g n k"], weights: Sequence[float], *, epsilon: float = 1e-6) -> Advantages:
    """Computes advantages from the weighted sum of normalized rewards. The metric `reward` is the weighted sum of the raw rewards.

    Args:
        rewards: k rewards of each completion; NaN where one is missing.

    Raises:
        BadInput: the number of weights is not k.
    """
    by = reward_weights(rewards, weights)
    each = jax.vmap(groups, 2, 2)(rewards)
    size = jnp.maximum(each.size, 1.0)
    apart = jnp.where(each.scored, each.rewards - jnp.sum(each.rewards, 1, keepdims=True) / size, 0.0)
    std = deviation(apart, each.size, 1)
    # A reward of weight 0 teaches nothing, however it differs.
    useful = each.useful & (by != 0)
    summed = jnp.sum(jnp.where(useful, apart / (std + epsilon), 0.0) * by, -1)
    of = groups(total(rewards, weights))
    of = of._replace(useful=jnp.any(useful, -1))
    return of.advantages(standardize(summed, of.scored, epsilon))
