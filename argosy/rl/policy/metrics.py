"""Metrics that are summed over micro-batches: `total = first + second`, then `total.value()`.

A mean alone cannot report an extreme or an effective sample size, so each kind of metric is a type. Each can be accumulated from zeros.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.train.objectives.loss import WeightedMean


class Highest(NamedTuple):
    """The largest of nonnegative numbers; 0 if there are none."""

    highest: Float[Array, ""]

    def __add__(self, other: Any) -> "Highest":
        return Highest(jnp.maximum(self.highest, other.highest))

    def value(self) -> Float[Array, ""]:
        return self.highest


class Lowest(NamedTuple):
    """The smallest of positive numbers, stored as its inverse; 0 if there are none."""

    inverse: Float[Array, ""]

    def __add__(self, other: Any) -> "Lowest":
        return Lowest(jnp.maximum(self.inverse, other.inverse))

    def value(self) -> Float[Array, ""]:
        return jnp.where(self.inverse == 0, 0.0, 1.0 / jnp.where(self.inverse == 0, 1.0, self.inverse))


class EffectiveShare(NamedTuple):
    """The effective sample size of importance weights as a share of their number: (sum w)^2 / (n sum w^2), 1 if all are equal."""

    total: Float[Array, ""]
    squares: Float[Array, ""]
    number: Float[Array, ""]

    def __add__(self, other: Any) -> "EffectiveShare":
        return EffectiveShare(*(a + b for a, b in zip(self, other)))

    def value(self) -> Float[Array, ""]:
        """Returns the share; 0 if every weight is 0."""
        below = self.number * self.squares
        return jnp.where(below == 0, 0.0, self.total**2 / jnp.where(below == 0, 1.0, below))


Metric = WeightedMean | Highest | Lowest | EffectiveShare
Metrics = dict[str, Metric]


def mean_where(values: Float[Array, "..."], mask: Float[Array, "..."]) -> WeightedMean:
    """Computes the mean of the values where the mask is 1. The other values may be NaN."""
    return WeightedMean(jnp.sum(jnp.where(mask > 0, values, 0.0)), jnp.sum((mask > 0).astype(values.dtype)))


def highest_where(values: Float[Array, "..."], mask: Float[Array, "..."]) -> Highest:
    """Computes the largest of the values where the mask is 1. The values must be nonnegative."""
    return Highest(jnp.max(jnp.where(mask > 0, values, 0.0), initial=0.0))


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Returns the values of metrics by name. A mean over nothing is left out, because 0 would look like a reward."""
    return {
        name: float(metric.value())
        for name, metric in metrics.items()
        if not isinstance(metric, WeightedMean) or float(metric.weight)
    }
