"""Generalized advantage estimation (GAE), for PPO with a critic: Schulman et al. 2015, arXiv:1506.02438, equations 11 to 16.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        R_t = A_t + V_t

V_t is the critic's value before token t is chosen. After the EOS nothing follows: V_{T+1} = 0. A completion that was cut at the length
limit has not ended: V_{T+1} is the critic's value after its last token (`after`). Taking 0 there, as verl does, tells the critic that
nothing would have followed.

Tokens outside the mask (tools, environments) are no actions: they are skipped, and V_{t+1} is the value at the policy's next token. A
reward outside the mask counts for the policy's token before it, so a reward on padding is not lost.

gamma = 1, so that a reward at the end is worth as much to a long completion as to a short one; lambda = 0.95 is from PPO's paper. With
lambda = 1, verl's default, the advantage is the return minus the value.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.advantages.groups import TokenAdvantages, standardize


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    after: Float[Array, "B"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize: bool = True,
) -> TokenAdvantages:
    """Computes the advantage and the return of every token.

    A row with a reward of NaN counts as a completion without a reward: its mask is 0 in the result.

    Args:
        rewards: the reward of each token. `argosy.rl.advantages.totals.at_last` makes them from the rewards of completions.
        values: the critic's value before each token.
        mask: 1 for tokens that the policy sampled.
        after: the critic's value after the last token of completions that were cut, and 0 for those that ended. None if all ended.
        gamma: the discount per token.
        lam: lambda, between 0 (least variance) and 1 (least bias).
        normalize: whether advantages are normalized to mean 0 and standard deviation 1 over all tokens of the batch. Returns are not.
    """
    scored = jnp.all(jnp.isfinite(rewards), 1, keepdims=True)
    live = (mask > 0) & scored
    rewards = jnp.where(scored, rewards, 0.0)
    values = jnp.where(live, values, 0.0)
    zeros = jnp.zeros_like(values[:, 0])

    def back(carry: tuple[Array, Array, Array], at: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], Array]:
        following, advantage, waiting = carry
        reward, value, is_own = at
        reward = reward + waiting
        here = reward + gamma * following - value + gamma * lam * advantage
        carry = jnp.where(is_own, value, following), jnp.where(is_own, here, advantage), jnp.where(is_own, 0.0, reward)
        return carry, jnp.where(is_own, here, 0.0)

    start = (zeros if after is None else jnp.where(scored[:, 0], after, 0.0), zeros, zeros)
    advantages = jax.lax.scan(back, start, (rewards.T, values.T, live.T), reverse=True)[1].T
    returns = jnp.where(live, advantages + values, 0.0)
    return TokenAdvantages(standardize(advantages, live) if normalize else advantages, returns, jnp.where(live, mask, 0.0))
