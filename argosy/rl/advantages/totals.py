"""Rewards before they become advantages. A missing reward is NaN, never 0: 0 is a reward.

Infinite rewards count as missing too, since the mean of their group would be infinite.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.rl.policy.metrics import Metrics, mean_where


def total(rewards: Float[Array, "g n k"], weights: Sequence[float]) -> Float[Array, "g n"]:
    """Computes the weighted sum of the k rewards of each completion. Missing rewards are left out; a completion without any gets NaN.

    A reward function may therefore score some of the prompts only (mathematics, code), as in TRL 1.16. To normalize each reward before
    the sum, see `argosy.rl.algorithms.gdpo`.

    Raises:
        BadInput: the number of weights is not k.
    """
    by = reward_weights(rewards, weights)
    there = jnp.isfinite(rewards)
    return jnp.where(jnp.any(there, -1), jnp.sum(jnp.where(there, rewards, 0.0) * by, -1), jnp.nan)


def reward_weights(rewards: Float[Array, "g n k"], weights: Sequence[float]) -> Float[Array, "k"]:  # noqa: F821
    """Returns the weights of the k rewards as an array, in the type of the rewards.

    Raises:
        BadInput: the number of weights is not k.
    """
    if len(weights) != rewards.shape[-1]:
        raise BadInput(
            f"{plural(rewards.shape[-1], 'reward')} and {plural(len(weights), 'weight')}",
            hint="give each reward a weight; 1.0 leaves it as it is",
        )
    return jnp.asarray(weights, rewards.dtype)


def reward_metrics(rewards: Float[Array, "g n k"], names: Sequence[str]) -> Metrics:
    """Computes, for each reward, its mean over the completions that have it, and the share of completions that lack it."""
    there = jnp.isfinite(rewards).astype(rewards.dtype)
    out: Metrics = {}
    for i, name in enumerate(names):
        out[f"rewards/{name}"] = mean_where(rewards[..., i], there[..., i])
        out[f"rewards/{name}/missing"] = mean_where(1.0 - there[..., i], jnp.ones_like(there[..., i]))
    return out


def overlong(lengths: Float[Array, "*n"], longest: int, margin: int) -> Float[Array, "*n"]:
    """Computes DAPO's soft punishment of overlong completions (arXiv:2503.14476, equation 13), which is added to the reward.

    It is 0 up to `longest - margin` tokens, falls linearly to -1 at `longest` tokens, and is -1 beyond. The paper has longest = 20480
    and margin = 4096. With a margin of 0 only completions longer than `longest` are punished.

    Args:
        lengths: the length of each completion in tokens, the end-of-sequence token included.
        longest: the length from which the punishment is -1, in tokens.
        margin: the length over which the punishment grows, in tokens.

    Raises:
        BadInput: margin is not between 0 and longest.
    """
    if not 0 <= margin <= longest:
        raise BadInput(f"a margin of {margin} tokens for answers of at most {longest}", hint=f"choose 0 to {longest} tokens")
    over = lengths - (longest - margin)
    soft = -jnp.clip(over / max(margin, 1), 0.0, 1.0)
    return jnp.where(lengths > longest, -1.0, soft if margin else 0.0)


def at_last(rewards: Float[Array, "B"], mask: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Places the reward of each completion at the last token of its mask, which is the end-of-sequence token if there is one. All other
    tokens get 0. The reward of a row without tokens is lost.
    """
    live = mask > 0
    after = jnp.cumsum(live[:, ::-1].astype(jnp.int32), 1)[:, ::-1]
    return jnp.where(live & (after == 1), rewards[:, None], 0.0)
