"""Checksums of the bits that each device holds of an array, so that the copies on several devices can be compared."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def checksum(a: jax.Array) -> jax.Array:
    """Returns the sum of an array's words modulo 2**32, each weighted by its position. It changes with every flip of a single bit, and
    when two values are exchanged."""
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(a, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize])
    place = jnp.ones(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = place * jnp.uint32(bits.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # The factor is odd, so that no bit of a difference is lost.
    return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)


def by_device(places: Sequence[NamedSharding], mesh: Mesh) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns a function that maps arrays with these shardings to checksums [devices, arrays], replicated on all devices. An entry is
    the checksum of the shard of an array that a device holds. Devices are in the order of the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def local(*arrays: jax.Array) -> jax.Array:
        return jnp.stack([checksum(a) for a in arrays])[None]

    rows = PartitionSpec(tuple(mesh.axis_names))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(place.spec for place in places), out_specs=rows, check_vma=False)
    compiled = jax.jit(mapped, out_shardings=everywhere)
    return lambda arrays: compiled(*arrays)


def copies(place: Any, shape: tuple[int, ...], mesh: Mesh) -> list[list[int]]:
    """Returns the groups of devices that hold the same shard of an array, as indices in the mesh. Shards that only one device holds are
    left out."""
    holders: dict[Any, list[int]] = {}
    parts = place.devices_indices_map(shape)
    for number, device in enumerate(mesh.devices.flat):
        holders.setdefault(tuple((axis_slice.start, axis_slice.stop) for axis_slice in parts[device]), []).append(number)
    return [numbers for numbers in holders.values() if len(numbers) > 1]


def odd_ones(sums: np.ndarray, groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns the devices whose checksum differs from that of most devices with the same shard. If no checksum is the most frequent one
    (as with two devices that differ), all devices of the group are returned.

    Args:
        sums: the checksum of each device.
        groups: the result of `copies`.
    """
    odd = []
    for group in groups:
        values, counts = np.unique(sums[list(group)], return_counts=True)
        if len(values) == 1:
            continue
        most = values[counts == counts.max()]
        odd += [device for device in group if len(most) > 1 or sums[device] != most[0]]
    return odd
