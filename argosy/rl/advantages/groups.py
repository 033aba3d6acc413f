"""Advantages: how much better each completion is than expected. One algorithm per file.

These rules hold for all algorithms that compare the completions of a prompt:

- A missing reward (NaN) is not 0: the completion takes no part in the statistics of its group, its advantage is 0, and `rows` takes its
  tokens out of the mask, so that it does not weigh in the loss either. TRL leaves its tokens in the divisor.
- A group is useless if it has fewer than two rewards, or if all are equal. Its advantages are exactly 0, and it is counted: dynamic
  sampling (DAPO, arXiv:2503.14476) resamples such groups. Equal means within 8 roundings of the largest reward: 0.1 + 0.2 and 0.3 are
  equal rewards, and their rounding error divided by its own standard deviation must not become an advantage of 1. TRL and verl add 1e-4
  and 1e-6 to the divisor instead.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from argosy.rl.policy.metrics import Metrics, mean_where
from argosy.train.objectives.loss import WeightedMean


class Advantages(NamedTuple):
    """The advantages of the completions of a whole rollout.

    values: the advantage of each completion; 0 where the reward is missing or the group is useless.
    scored: whether the completion has a reward.
    useful: whether an advantage of the group can differ from 0.
    metrics: means of rewards, and shares of missing rewards and of useless groups.
    """

    values: Float[Array, "g n"]
    scored: Bool[Array, "g n"]
    useful: Bool[Array, "g 1"]
    metrics: Metrics

    def rows(self, mask: Float[Array, "B T"]) -> tuple[Float[Array, "B 1"], Float[Array, "B T"]]:
        """Returns the advantage of each row, and the mask, which is now also 0 at all tokens of completions without a reward."""
        scored_mask = jnp.where(self.scored.reshape(-1, 1), mask, 0.0)
        return self.values.reshape(-1, 1), scored_mask


class TokenAdvantages(NamedTuple):
    """The advantages of tokens.

    values: the advantage of each token.
    returns: the return of each token, which a critic learns.
    mask: 1 for tokens that have an advantage.
    """

    values: Float[Array, "B T"]
    returns: Float[Array, "B T"]
    mask: Float[Array, "B T"]


class Groups(NamedTuple):
    """The rewards of completions, one row per group.

    rewards: the reward of each completion; 0 where it is missing.
    scored: whether the completion has a reward.
    size: the number of rewards in the group.
    useful: whether the group can be learned from.
    """

    rewards: Float[Array, "g n"]
    scored: Bool[Array, "g n"]
    size: Float[Array, "g 1"]
    useful: Bool[Array, "g 1"]

    @property
    def mean(self) -> Float[Array, "g 1"]:
        return jnp.sum(self.rewards, 1, keepdims=True) / jnp.maximum(self.size, 1.0)

    @property
    def std(self) -> Float[Array, "g 1"]:
        """The sample standard deviation (divided by size - 1); 0 for fewer than two rewards."""
        return deviation(jnp.where(self.scored, self.rewards - self.mean, 0.0), self.size, 1)

    def advantages(self, values: Float[Array, "g n"]) -> Advantages:
        """Makes advantages of these values. They become 0 where the reward is missing or the group is useless."""
        several = (self.size > 1).astype(values.dtype)
        metrics: Metrics = {
            "reward": mean_where(self.rewards, self.scored.astype(values.dtype)),
            "reward_std": mean_where(self.std, several),
            "rewards/missing": share_where(~self.scored, values.dtype),
            "groups/useless": share_where(~self.useful, values.dtype),
        }
        return Advantages(jnp.where(self.scored & self.useful, values, 0.0), self.scored, self.useful, metrics)


def groups(rewards: Float[Array, "g n"]) -> Groups:
    """Groups rewards [g n] by prompt. Finds which rewards are missing, and which groups can be learned from."""
    scored = jnp.isfinite(rewards)
    clean = jnp.where(scored, rewards, 0.0)
    size = jnp.sum(scored.astype(rewards.dtype), 1, keepdims=True)
    return Groups(clean, scored, size, (size > 1) & differ(clean, scored, 1))


def differ(values: Float[Array, "..."], where: Bool[Array, "..."], axis: int | None = None) -> Bool[Array, "..."]:
    """Whether values differ by more than rounding: by more than 8 epsilon times the largest absolute value.

    Args:
        where: the values to compare.
        axis: the axis to compare along, which is kept with size 1; None: all axes.
    """
    high = jnp.max(jnp.where(where, values, -jnp.inf), axis, keepdims=True)
    low = jnp.min(jnp.where(where, values, jnp.inf), axis, keepdims=True)
    largest = jnp.max(jnp.where(where, jnp.abs(values), 0.0), axis, keepdims=True)
    return high - low > 8 * float(jnp.finfo(values.dtype).eps) * largest


def standardize(
    values: Float[Array, "..."], where: Bool[Array, "..."], epsilon: float = 1e-8
) -> Float[Array, "..."]:
    """Subtracts the mean of the values and divides by their sample standard deviation plus epsilon. The result is 0 outside `where`. It
    is 0 everywhere if all values are equal."""
    weight = where.astype(values.dtype)
    count = jnp.sum(weight)
    mean = jnp.sum(jnp.where(where, values, 0.0)) / jnp.maximum(count, 1.0)
    apart = jnp.where(where, values - mean, 0.0)
    return jnp.where(differ(values, where), apart / (deviation(apart, count) + epsilon), 0.0)


def deviation(apart: Float[Array, "..."], count: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """Computes the sample standard deviation from distances to the mean. Distances are scaled before they are squared, because the
    square of 1e30 overflows float32.

    Args:
        apart: the distance of each value to the mean; 0 where there is no value.
        count: the number of values.
    """
    scale = jnp.max(jnp.abs(apart), axis, keepdims=True)
    scale = jnp.where(scale > 0, scale, 1.0)
    squares = jnp.sum((apart / scale) ** 2, axis, keepdims=True) / jnp.maximum(count - 1, 1.0)
    std = scale * jnp.sqrt(squares)
    return std if axis is not None else std.reshape(())


def share_where(where: Bool[Array, "..."], dtype: jnp.dtype) -> WeightedMean:
    """Returns a metric, the share of entries that are true."""
    return mean_where(where.astype(dtype), jnp.ones(where.shape, dtype))
