"""Groups of workers in this process. Each group has some of its devices, and a thread.

With the proxy of Pathways (JAX_PLATFORMS=proxy), one process has the devices of all machines, and `jax.device_put` moves arrays between
devices without a transfer through this process. There are no worker processes that could end. Errors of a device are raised by the
call.
"""

import itertools
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import jax
import numpy as np

from argosy.core.command import install_extra
from argosy.core.errors import BadInput, Unsupported
from argosy.launch.workers.arrays.transfers import placements
from argosy.launch.workers.arrays.trees import apart, describe_tree, together, unpack_arguments
from argosy.launch.workers.engines.child import function_of
from argosy.launch.workers.engines.here import Here, mesh_over, sizes_of, thread
from argosy.launch.workers.errors import WorkerError, WorkerLost
from argosy.launch.workers.settings import Group

PROXY = "proxy"


def inline(groups: Mapping[str, Group]) -> Callable[[str, Callable[[WorkerLost], None]], "Inline"]:
    """Divides the devices of this process among groups. Returns a function that starts a group.

    Raises:
        BadInput: there are too few devices.
        Unsupported: a setting of a group needs separate processes.
    """
    for name, group in groups.items():
        if wrong := [field for field in ("stuck", "environment", "restarts") if getattr(group, field)]:
            hint = "a thread cannot be ended, and has no environment: engine=local and engine=ray have processes"
            raise Unsupported(f"engine=inline has no {wrong[0]}", where=f"group `{name}`", hint=hint)
    pathways()
    there, counts = jax.devices(), [group.processes * group.devices for group in groups.values()]
    if sum(counts) > len(there):
        raise BadInput(f"the groups want {sum(counts)} devices, and this process has {len(there)}")
    at = [0, *itertools.accumulate(counts)]
    devices = {name: there[start : start + count] for name, start, count in zip(groups, at, counts)}
    return lambda name, died: Inline(name, devices[name], groups[name].mesh)


def pathways() -> bool:
    """Registers the proxy of Pathways as a platform of jax, if JAX_PLATFORMS asks for it. Returns whether it does.

    Raises:
        Unsupported: pathwaysutils is not installed.
    """
    if PROXY not in (getattr(jax.config, "jax_platforms", None) or "").split(","):
        return False
    try:
        library = import_module("pathwaysutils")
    except ImportError:
        problem = f"JAX_PLATFORMS={PROXY} needs pathwaysutils, which is not installed"
        raise Unsupported(problem, hint=install_extra("pathways")) from None
    library.initialize()
    return True


class Inline:
    """One life of a group in this process; the counterpart of `workers.gang.WorkerGang`."""

    pids: list[int] = []  # noqa: RUF012

    def __init__(self, name: str, devices: Sequence[Any], mesh: Mapping[str, int]):
        self.name, self.lost = name, None
        self.mesh = mesh_over(devices, sizes_of(mesh, len(devices), f"group `{name}`"))
        self.objects: dict[int, Any] = {}

    lost: WorkerLost | None

    def join(self) -> None: ...

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost.again()

    def lose(self, error: WorkerLost) -> None:
        self.lost = self.lost or error
        self.objects.clear()

    def close(self) -> None:
        self.lose(WorkerLost("was ended by its controller", self.name, 0, meant=True))

    def stored(self, number: int) -> Any:
        self.check()
        if number not in self.objects:
            raise BadInput(f"the group `{self.name}` does not have value {number} any more", hint="it was freed")
        return self.objects[number]

    def call(self, number: int, function: str, arguments: bytes) -> None:
        target = function_of(function)
        words, kwargs = unpack_arguments(arguments, self.stored)
        token = thread.set(Here(self.name, 0, 1, self.mesh))
        try:
            with jax.default_device(self.mesh.devices.flat[0]):
                out = jax.block_until_ready(target(*words, **kwargs))
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            text = "".join(traceback.format_exception(error))
            raise WorkerError(f"{type(error).__name__}: {first}", self.name, 0, text) from None
        finally:
            thread.reset(token)
        self.check()
        self.objects[number] = out

    def source(self, number: int) -> Any:
        return self.stored(number)

    def pull(self, number: int, source: Any, sharding: Any) -> int:
        _, leaves = describe_tree(source, several=False)
        skeleton, _, arrays = apart(source, "the result", "")
        places = placements(skeleton, leaves, self.mesh, pickle.loads(pickle.dumps(sharding)))
        copies = [jax.device_put(_apart_from(array, self.mesh), place) for array, place in zip(arrays, places)]
        self.objects[number] = jax.block_until_ready(together(skeleton, copies))
        return sum(_bytes_of(array) for array in copies)

    def value(self, number: int) -> Any:
        skeleton, _, arrays = apart(self.stored(number), "the result", "return arrays and plain values to bring or move them")
        return together(skeleton, [np.array(array) for array in arrays])

    def values(self, number: int) -> list[Any]:
        return [self.value(number)]

    def free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.objects.pop(number, None)


def _apart_from(array: Any, mesh: jax.sharding.Mesh) -> Any:
    """Copies an array if it is a numpy array or is on devices of the mesh. Otherwise `device_put` might share its buffers, and a call
    that donates the original would delete them, or its owner might change them."""
    if isinstance(array, np.ndarray):
        return np.array(array)
    return jax.numpy.copy(array) if isinstance(array, jax.Array) and array.devices() & set(mesh.devices.flat) else array


def _bytes_of(array: jax.Array) -> int:
    """Returns the bytes of all shards of an array. Replicas of a shard count once."""
    boxes = {str(index): shard for shard in array.addressable_shards for index in [shard.index]}
    return sum(shard.data.nbytes for shard in boxes.values())


