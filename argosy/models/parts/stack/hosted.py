"""Weights of layers that lie in the host's memory: each layer brings its own to the device as it runs, and again in the backward pass.

The gradient of a weight on the host is wanted on the device, but the transpose of a copy to the device is a copy to the host. So such a
weight comes with a slot: zeros on the device, which no program reads. The gradient is taken of the slot.
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
    """A weight in the host's memory, and the slot on the device, of the same shape, that its gradient goes to."""

    array: Any
    slot: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def on_host(array: Any) -> bool:
    """Whether an array, or the array that is traced, is in the host's memory."""
    return isinstance(array, jax.Array) and jax.typeof(array).memory_space == Space.Host


def slots(leaves: Leaves) -> Leaves:
    """What to differentiate: the weights, and slots for those in the host's memory."""
    return {a: jnp.zeros(leaf.shape, leaf.dtype) if on_host(leaf) else leaf for a, leaf in leaves.items()}


def with_slots(leaves: Leaves, moving: Leaves) -> Leaves:
    """The weights that a model is given: `moving` (of `slots`), and those of the host's memory with their slots."""
    return {a: Hosted(leaf, moving[a]) if on_host(leaf) else moving[a] for a, leaf in leaves.items()}


def brought(leaves: Leaves) -> Leaves:
    """The weights on the device. The others stay what they are."""
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
