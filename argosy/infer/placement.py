"""The devices that weights lie on, and where the state of programs over them lies."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from argosy.models.parts.weight import Leaves


def weights_mesh(weights: Leaves) -> Mesh | None:
    """The mesh of devices that weights are split over; None if they are on one device."""
    for a in weights.values():
        if isinstance(a, jax.Array) and isinstance(a.sharding, NamedSharding) and len(a.devices()) > 1:
            mesh = a.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


# Where arrays lie that every device of a model has whole; None: on JAX's default device, wherever that is.
Home = NamedSharding | SingleDeviceSharding | None


def weights_home(weights: Leaves) -> Home:
    """Where the state of programs over these weights lies. A weight that was put on a device explicitly ties programs to that device,
    and they compile anew for state that is tied to none."""
    if (mesh := weights_mesh(weights)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    tied = next((a for a in weights.values() if isinstance(a, jax.Array) and a.committed), None)
    return None if tied is None else SingleDeviceSharding(next(iter(tied.devices())))


def home_mesh(home: Home) -> Mesh | None:
    """The mesh of a home on several devices."""
    return home.mesh if isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh) else None
