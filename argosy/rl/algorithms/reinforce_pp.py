"""REINFORCE++: Hu 2025, arXiv:2501.03262. Advantages normalized over the whole batch instead of the group.

    A_t = r - sum of penalty_i, i >= t                   then  (A_t - mean(A)) / std(A)  over all tokens of the batch
    A_i = r_i - mean of its group                        then  (A_i - mean(A)) / std(A)  over all completions   (baseline)

penalty_i is beta log(p_old / p_ref) of token i: `argosy.rl.policy.kl.in_reward` without a reward. The baseline variant has its KL in
the loss.

Without the baseline, groups do not matter: a prompt whose completions are all right has positive advantages, as in the paper, and no
group is useless. With the baseline, the mean over completions is 0, so groups of equal rewards have advantages of 0. verl differs: it
normalizes the baseline variant over tokens, where long completions shift the mean and groups of equal rewards get advantages.
"""

from typing import TYPE_CHECKING, Literal

from argosy.rl.policy.settings import AdvantageName, Average, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages, TokenAdvantages


class ReinforcePP(Policy):
    """REINFORCE++ (arXiv:2501.03262): advantages normalized over the batch. `advantages=reinforce_pp_baseline` is its variant with a
    baseline."""

    kl_in: Literal["loss", "reward"] = "reward"
    advantages: AdvantageName = "reinforce_pp"
    average: Average = "tokens"


def reinforce_pp(
    rewards: "Float[Array, 'g n']", mask: "Float[Array, 'B T']", penalty: "Float[Array, 'B T'] | None" = None
) -> "TokenAdvantages":
    """Computes advantages of tokens, normalized over the batch; 0 where the reward is missing. The returns are the advantages before
    normalization.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
        mask: 1 for tokens that the policy sampled.
        penalty: the penalty of each token, which is subtracted from the return of this token and of all earlier ones.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import TokenAdvantages, standardize

    flat = rewards.reshape(-1, 1)
    scored = jnp.isfinite(flat)
    live = (mask > 0) & scored
    ahead = 0.0
    if penalty is not None:
        ahead = jnp.cumsum(jnp.where(live, penalty, 0.0)[:, ::-1], 1)[:, ::-1]
    returns = jnp.where(live, jnp.where(scored, flat, 0.0) - ahead, 0.0)
    return TokenAdvantages(standardize(returns, live), returns, jnp.where(live, mask, 0.0))


def reinforce_pp_baseline(rewards: "Float[Array, 'g n']") -> "Advantages":
    """Computes advantages relative to the mean of the group, normalized over the batch.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
    """
    import jax.numpy as jnp

    from argosy.rl.advantages.groups import groups, standardize

    of = groups(rewards)
    centered = jnp.where(of.scored & of.useful, of.rewards - of.mean, 0.0)
    return of.advantages(standardize(centered, of.scored))
