"""The return value of an objective: the loss, metrics, and updates of weights that change by a rule instead of a gradient.

Losses and metrics are sums with their weights, never means. So everything is divided once, by the weight of the whole batch, whatever
the accumulation, the packing and the load of each device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The trained model under "model", frozen ones (reference, teacher, critic) under their roles.
Models = Mapping[str, Any]


class WeightedMean(NamedTuple):
    """A mean before its division.

    total: the weighted sum.
    weight: the sum of the weights.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Any) -> "WeightedMean":
        return WeightedMean(self.total + other.total, self.weight + other.weight)

    def value(self) -> Float[Array, ""]:
        """Returns the mean; zero if the weight is zero."""
        return jnp.where(self.weight == 0, 0.0, self.total / jnp.maximum(self.weight, 1e-30))


@dataclass(frozen=True)
class RuleUpdate:
    """The update of a weight by a rule instead of a gradient.

    statistic: a statistic of a micro-batch; the statistics of all micro-batches are added. It is an array that is a sum over examples
        (or a shape, while only shapes are computed), or an object with its own `+`, such as a maximum.
    rule: (weight, statistic of the whole batch) -> new weight.
    """

    statistic: Any
    rule: Callable[[Array, Any], Array]


jax.tree_util.register_dataclass(RuleUpdate, ["statistic"], ["rule"])


class Loss(NamedTuple):
    """The return value of an objective.

    loss: the loss.
    metrics: the metrics, by name.
    updates: the updates of weights that change by a rule, by parameter name.
    """

    loss: WeightedMean
    metrics: dict[str, WeightedMean]
    updates: dict[str, RuleUpdate] = {}  # noqa: RUF012
