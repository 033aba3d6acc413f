"""What is minimized, a file each. An objective says what it reads, and is `(models, batch, key) -> Loss`.

Losses and metrics are sums with their weights, never means: so accumulation, packing and devices of unequal load all divide
once, by the weight of the whole batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.data.batch import Fields

Models = Mapping[str, Any]  # the trained model under "model", frozen ones (reference, teacher, critic) under their roles


class Mean(NamedTuple):
    """A mean in the making: the weighted sum, and the weight."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Any) -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> Float[Array, ""]:
        """Zero where there was no weight."""
        return jnp.where(self.weight == 0, 0.0, self.total / jnp.maximum(self.weight, 1e-30))


@dataclass(frozen=True)
class Update:
    """How a weight moves by a rule instead of a gradient.

    statistic: a sum over the batch; parts of a batch add up. rule: (weight, statistic of the whole batch) -> the new weight.
    """

    statistic: Array
    rule: Callable[[Array, Array], Array]


jax.tree_util.register_dataclass(Update, ["statistic"], ["rule"])


class Loss(NamedTuple):
    """What is minimized, metrics beside it, and the weights that move by a rule, by address."""

    loss: Mean
    metrics: dict[str, Mean]
    updates: dict[str, Update] = {}  # noqa: RUF012


@runtime_checkable
class Objective(Protocol):
    """Settings that are also the function; pure.

    rows_per_group: how many rows of a batch belong together (2: a preference pair); they are never split.
    """

    rows_per_group: ClassVar[int]

    def reads(self) -> Fields:
        """The arrays of a batch that it reads, by name."""
        ...

    def __call__(self, models: Models, batch: dict[str, Array], key: Array) -> Loss: ...

