"""What is minimised, a file each. An objective is `(model, batch, key) -> Loss`.

Losses and metrics are sums with their weights, never means: so accumulation, packing and devices of unequal load all divide
once, by the weight of the whole batch.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.core.registry import Registry


class Mean(NamedTuple):
    """A mean in the making: the weighted sum, and the weight."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Any) -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> Float[Array, ""]:
        """Zero where there was no weight."""
        return jnp.where(self.weight == 0, 0.0, self.total / jnp.maximum(self.weight, 1e-30))


class Loss(NamedTuple):
    """What is minimised, and what is told beside it.

    loads: how many tokens each expert got, by the address of the bias that this moves.
    """

    loss: Mean
    metrics: dict[str, Mean]
    loads: dict[str, Array] = {}  # noqa: RUF012


@runtime_checkable
class Objective(Protocol):
    """Settings that are also the function; pure."""

    def __call__(self, model: Any, batch: dict[str, Array], key: Array) -> Loss: ...


OBJECTIVES = Registry("objective")
OBJECTIVES.add("next_token", "argosy.train.objectives.next_token:NextToken")
