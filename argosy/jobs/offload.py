"""Whether a run can keep its optimizer's state in the host's memory."""

from typing import Any

import jax
from jax.sharding import Mesh

from argosy.core.errors import BadInput, Unsupported
from argosy.train.offload import HOST


def check_offload(run: Any, decided: Any, mesh: Mesh) -> bool:
    """Whether the optimizer's state goes to the host's memory.

    Raises:
        BadInput: layers are not stacked, so the state would come to an accelerator at once.
        Unsupported: the device cannot read the host's memory, or the run does what is not built with it.
    """
    if run.execution.offload == "none":
        return False
    device, where = mesh.devices.flat[0], "execution.offload=optimizer"
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise Unsupported(f"{device.device_kind} has no pinned memory of the host", where=where, hint="execution.offload=none")
    asked = {"mesh.stage": mesh.shape["stage"] > 1, "rollouts": run.rollout is not None, "several processes": jax.process_count() > 1}
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise Unsupported(f"{' and '.join(found)}: not built with state on the host yet", where=where, hint="execution.offload=none")
    if decided.layers == "unroll" and device.platform != "cpu":
        what = "the optimizer's state goes to the device layer by layer, and these layers are a list (execution.run=unroll)"
        raise BadInput(what, where=where, hint="execution.run=scan; a run that began with a list of layers keeps it")
    return True
