"""Objectives: what training minimizes, one file each. An objective declares what it reads, and is a function `(models, batch,
key) -> Loss`.

Losses and metrics are sums with their weights, never means: so with accumulation, packing and devices of unequal load, everything
is divided once, by the weight of the whole batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.data.batch import Fields

# The trained model under "model", frozen ones (reference, teacher, critic) under their roles.
Models = Mapping[str, Any]


class WeightedMean(NamedTuple):
    """A mean before its division: the weighted sum, and the weight."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Any) -> "WeightedMean":
        return WeightedMean(self.total + other.total, self.weight + other.weight)

    def value(self) -> Float[Array, ""]:
        """The mean; zero if the weight is zero."""
        return jnp.where(self.weight == 0, 0.0, self.total / jnp.maximum(self.weight, 1e-30))


@dataclass(frozen=True)
class RuleUpdate:
    """How a weight changes by a rule instead of a gradient.

    statistic: an array (or its shape, while shapes are computed), a sum over the batch; those of the parts of a batch are added.
    rule: (weight, statistic of the whole batch) -> new weight.
    """

    statistic: Any
    rule: Callable[[Array, Array], Array]


jax.tree_util.register_dataclass(RuleUpdate, ["statistic"], ["rule"])


class Loss(NamedTuple):
    """The loss, metrics, and updates of weights that change by a rule, by address."""

    loss: WeightedMean
    metrics: dict[str, WeightedMean]
    updates: dict[str, RuleUpdate] = {}  # noqa: RUF012


@runtime_checkable
class Objective(Protocol):
    """The settings of an objective, which are also its function. It must be pure.

    rows_per_group: how many rows of a batch belong together (2: a preference pair); they are never split.

    An objective may also have

    before(models, batch, key) -> {name: Mean}
        means over the whole batch that its loss reads, without gradient. Where a batch is computed in parts, they are found first, over
        all parts, and each part's batch then holds them as scalars. Alone, a batch does without them: the loss computes its own. The
        models have no dropout there.
    trains_on: the formats of records that it trains on (`data.sources.records`); without it, those with one row an example.
    reference: "cached" or "online", if it compares the model with its first weights. cached: a batch holds `reference`, the
        log-probability of each sequence; online: `models["reference"]` is the frozen model.
    teacher: the model that it learns from, where it has one (`train.distillation`): "online", `models["teacher"]` is that model.
    evaluated: the metrics that an evaluation reports beside the perplexity.
    scores: how many scores the model's head must give for a token, in place of logits.
    least_groups: the fewest groups of a batch with which it makes sense.
    """

    rows_per_group: ClassVar[int]

    def reads(self) -> Fields:
        """The arrays of a batch that the objective reads, by name."""
        ...

    def __call__(self, models: Models, batch: dict[str, Array], key: Array) -> Loss: ...

