"""Checks that a run can keep its optimizer's state, and the weights of its layers, in the host's memory."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from argosy.core.errors import BadInput, Unsupported
from argosy.train.offload import HOST

# What is said where it saves nothing.
ON_CPU = "execution.offload={} saves no memory here: the memory of a CPU is the host's"


def check_offload(decided: Any, mesh: Mesh | AbstractMesh) -> None:
    """Checks that the run's layers and devices support `execution.offload`.

    Raises:
        BadInput: layers are not stacked, so their state would be on the device all at once.
        Unsupported: the device cannot read the host's memory.
    """
    device, where = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0], "set by execution.offload"
    # Devices that are known by numbers only are accelerators, which have it.
    if device is not None and HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise Unsupported(f"{device.device_kind} has no pinned memory of the host", where=where, hint="execution.offload=none")
    if decided.layers == "unroll":
        problem = "the optimizer's state goes to the device layer by layer, and these layers are a list (execution.run=unroll)"
        raise BadInput(problem, where=where, hint="execution.run=scan; a run that began with a list of layers keeps it")
