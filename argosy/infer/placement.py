"""The devices that weights are on, and the placement of the arrays that programs over them use."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from argosy.models.parts.weight import Leaves


def weights_mesh(weights: Leaves) -> Mesh | None:
    """The mesh of devices that weights are split over; None: they are on one device."""
    for a in weights.values():
        if isinstance(a, jax.Array) and isinstance(a.sharding, NamedSharding) and len(a.devices()) > 1:
            mesh = a.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


# The placement of arrays that are replicated on every device of a model; None: on JAX's default device.
Home = NamedSharding | SingleDeviceSharding | None


def weights_home(weights: Leaves) -> Home:
    """The placement of arrays, such as caches, that programs use with these weights. If a weight is committed to a device, other arrays
    must be too: programs would compile again for uncommitted ones."""
    if (mesh := weights_mesh(weights)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    tied = next((a for a in weights.values() if isinstance(a, jax.Array) and a.committed), None)
    return None if tied is None else SingleDeviceSharding(next(iter(tied.devices())))


def home_mesh(home: Home) -> Mesh | None:
    """The mesh of a placement on several devices; None if it is on one."""
    return home.mesh if isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh) else None
