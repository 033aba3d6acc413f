"""Copies of a model for data-parallel serving, each on its own devices and for its own engine.

The weights are read once, onto the devices of the first copy, and are copied from device to device from there. CPU devices of one
process share its memory, so N copies on them hold the weights once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from argosy.core.errors import BadInput
from argosy.infer.placement import weights_mesh
from argosy.models.parts.weight import Leaves, merge, put, split


def check_device_count(copies: int, tensor: int) -> None:
    """Checks that this process has `tensor` devices for each copy.

    Raises:
        BadInput: it has fewer.
    """
    here, needed = len(jax.devices()), copies * tensor
    if copies > 1 and needed > here:
        each = f" of tensor = {tensor} devices each" if tensor > 1 else ""
        raise BadInput(
            f"copies = {copies}{each}, but this process has {here} device{'s' * (here > 1)}",
            hint=f"to try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
        )


def model_copies(model: Any, count: int) -> list[Any]:
    """Returns `count` modules with equal weights, each committed to its own devices. The first is this module, whose weights move to
    the first devices in place; the others are on the devices that follow, with the same sharding. With a count of 1 nothing is moved.
    """
    if count == 1:
        return [model]
    graph, weights = split(model)
    mesh = weights_mesh(weights)
    size = 1 if mesh is None else mesh.size
    put(model, copy_to_devices(weights, jax.devices()[:size]))
    out = [model]
    for i in range(1, count):
        copy = merge(graph, copy_to_devices(weights, jax.devices()[i * size : (i + 1) * size]))
        copy.dtype = model.dtype
        out.append(copy)
    return out


def copy_to_devices(weights: Leaves, devices: Sequence[Any]) -> Leaves:
    """Copies weights to other devices with the same sharding. There must be as many devices as the weights are on."""
    return {address: _on(a, devices) for address, a in weights.items()}


def _on(a: jax.Array, devices: Sequence[Any]) -> jax.Array:
    if len(a.devices()) == 1:
        return _copied(a.addressable_data(0), devices[0])
    sharding = a.sharding
    assert isinstance(sharding, NamedSharding)
    old = sharding.mesh
    assert isinstance(old, Mesh)
    grid = np.asarray(devices).reshape(old.devices.shape)
    there = dict(zip(old.devices.flat, grid.flat, strict=True))
    place = NamedSharding(Mesh(grid, old.axis_names, axis_types=old.axis_types), sharding.spec)
    parts = [_copied(shard.data, there[shard.device]) for shard in a.addressable_shards]
    return jax.make_array_from_single_device_arrays(a.shape, place, parts)


def _copied(a: jax.Array, device: Any) -> jax.Array:
    """Copies an array to another device. On a CPU the result is a view of the same memory."""
    place = SingleDeviceSharding(device)
    return jax.device_put(np.asarray(a), place, may_alias=True) if device.platform == "cpu" else jax.device_put(a, place)
