"""Layers whose weights stay in the host's memory. Each layer copies its weights to the device when it runs, and again in the backward
pass.

The gradient of such a weight is needed on the device, but JAX's transpose of a copy to the device is a copy to the host. Each such
weight therefore has a slot: zeros on the device, which no program reads. The gradient is taken with respect to the slot.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from argosy.models.parts.weight import Leaves

Space = jax.memory.Space


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hosted:
    """A weight in the host's memory.

    array: the weight.
    slot: zeros of the same shape on the device. The weight's gradient is that of the slot.
    """

    array: Any
    slot: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def on_host(array: Any) -> bool:
    """Whether an array or a tracer is in the host's memory."""
    return isinstance(array, jax.Array) and jax.typeof(array).memory_space == Space.Host


def slots(leaves: Leaves) -> Leaves:
    """Returns the arrays to differentiate with respect to: weights on the device, and new slots for weights in the host's memory."""
    return {a: jnp.zeros(leaf.shape, leaf.dtype) if on_host(leaf) else leaf for a, leaf in leaves.items()}


def with_slots(leaves: Leaves, moving: Leaves) -> Leaves:
    """Returns the weights for the model: `Hosted` for weights in the host's memory, otherwise the arrays of `moving`.

    Args:
        moving: the result of `slots`, which is differentiated.
    """
    return {a: Hosted(leaf, moving[a]) if on_host(leaf) else moving[a] for a, leaf in leaves.items()}


def brought(leaves: Leaves) -> Leaves:
    """Copies `Hosted` weights to the device. Other weights are returned unchanged."""
    return {a: _bring(leaf) for a, leaf in leaves.items()}


def any_hosted(leaves: Collection[Any]) -> bool:
    return any(isinstance(leaf, Hosted) for leaf in leaves)


def _bring(leaf: Any) -> Any:
    if isinstance(leaf, Hosted):
        return _with_slot(leaf.array, leaf.slot)
    return jax.device_put(leaf, Space.Device) if on_host(leaf) else leaf


@jax.custom_vjp
def _with_slot(array: Any, slot: Any) -> Any:
    return jax.device_put(array, Space.Device)


def _forward(array: Any, slot: Any) -> tuple[Any, None]:
    return jax.device_put(array, Space.Device), None


def _backward(_: None, gradient: Any) -> tuple[None, Any]:
    return None, gradient


_with_slot.defvjp(_forward, _backward)
