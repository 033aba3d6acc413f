"""Tells a running function its place: the group of this process, its rank, and its mesh."""

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from argosy.core.errors import BadInput

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Here:
    """The place of this process in its group.

    group: the name of the group.
    rank: the rank of this process in the group.
    processes: the number of processes in the group.
    mesh: the mesh over all devices of the group, which is equal in all its processes.
    """

    group: str
    rank: int
    processes: int
    mesh: "Mesh"


class _Process:
    here: Here | None = None


# Groups that share a process (engine inline) have a thread each.
thread: ContextVar[Here | None] = ContextVar("here", default=None)


def here() -> Here:
    """Returns the place of this process.

    Raises:
        BadInput: this process is no worker.
    """
    place = thread.get() or _Process.here
    if place is None:
        raise BadInput("this process is no worker", hint='call the function by workers["NAME"].run')
    return place


def settle(place: Here) -> None:
    """Sets the place of this process. It is called once."""
    _Process.here = place


def mesh_over(devices: Sequence[Any], sizes: Mapping[str, int]) -> "Mesh":
    """Makes a mesh of devices, in their order.

    Args:
        sizes: the sizes of the axes, as `sizes_of` returns them.
    """
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))


def sizes_of(mesh: Mapping[str, int], devices: int, where: str) -> dict[str, int]:
    """Returns the axis sizes of a mesh, with -1 replaced by what remains of the devices.

    Args:
        mesh: the sizes of the axes, of which one may be -1.
        devices: the number of devices.
        where: the name of the group, for errors.

    Raises:
        BadInput: the product of the sizes is not the number of devices.
    """
    sizes = dict(mesh)
    product = math.prod(size for size in sizes.values() if size != -1)
    wrong = [size for size in sizes.values() if not isinstance(size, int) or size < -1 or size == 0]
    mesh_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if wrong or not sizes or list(sizes.values()).count(-1) > 1:
        raise BadInput(f"a mesh of {mesh_text or 'no axes'}", where=where, hint="sizes are 1 or more, and at most one is -1: the rest")
    if (-1 in sizes.values() and devices % product) or (-1 not in sizes.values() and product != devices):
        raise BadInput(f"a mesh of {mesh_text} over {devices} devices", where=where, hint="the sizes multiply to the devices")
    return {name: devices // product if size == -1 else size for name, size in sizes.items()}
