"""The description of a group of workers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from argosy.core.errors import ATTEMPT, SUPERVISED, BadInput
from argosy.launch.cluster import NATIVE, PARENT, STACKS, STUCK
from argosy.launch.workers.arrays.references import name_of
from argosy.launch.workers.engines.here import sizes_of
from argosy.observe.whereabouts import WHERE

# Of the controller's own variables, those by which it may belong to a gang itself.
OWN = ("ARGOSY_COORDINATOR", "ARGOSY_PROCESSES", "ARGOSY_RANK", ATTEMPT, SUPERVISED, PARENT, STACKS, STUCK, WHERE, NATIVE)


@dataclass(frozen=True)
class Group:
    """The description of a group of workers.

    Args:
        processes: the number of processes. With engine=inline there are none but the controller.
        devices: the number of devices of each process. They are CPU devices unless `gpus` is set.
        gpus: whether the devices are GPUs. With engine=inline the devices are those of the controller.
        mesh: the names and sizes of the axes of the mesh over the devices of all processes. One size may be -1, which stands for the
            rest.
        start: the function that is called first in every process after every start of the group: `module:function` or a function, or a
            tuple with its arguments, such as `("mine:build", 3)`. `workers[NAME].started` is the reference to its result.
        stuck: the seconds after which a call counts as stuck and the group is ended; None: never. Moves, and fetching values, never
            count as stuck.
        restarts: the number of times that the group restarts automatically after a process ended. Calls that were pending still raise.
        environment: environment variables of the processes.
        cpus: the number of CPUs that Ray reserves for each process.
    """

    processes: int = 1
    devices: int = 1
    gpus: bool = False
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1})
    start: Any = None
    stuck: float | None = None
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 1

    def check(self, name: str) -> None:
        """Raises:
        BadInput: a field has an invalid value.
        """
        where = f"group `{name}`"
        if not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise BadInput(f"`{name}` is no name for a group", hint="letters, digits, - and _")
        least = {"processes": 1, "devices": 1, "cpus": 1, "restarts": 0}
        for setting, least_of_it in least.items():
            value = getattr(self, setting)
            if not isinstance(value, int) or value < least_of_it:
                raise BadInput(f"{setting}={value!r}", where=where, hint=f"a whole number of {least_of_it} or more")
        if self.stuck is not None and not self.stuck > 0:
            raise BadInput(f"stuck={self.stuck!r}", where=where, hint="seconds, or None")
        sizes_of(self.mesh, self.processes * self.devices, where)
        if self.start is not None:
            name_of(self.started_with[0])

    @property
    def started_with(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns the function that is called first, and its arguments."""
        function, *arguments = self.start if isinstance(self.start, tuple | list) else (self.start,)
        return function, tuple(arguments)

    def hello(self, name: str, rank: int, host: str) -> dict[str, Any]:
        """Makes the first message to a process, which tells it its group, rank, devices and mesh."""
        sizes = sizes_of(self.mesh, self.processes * self.devices, f"group `{name}`")
        who = {"group": name, "rank": rank, "processes": self.processes}
        return who | {"devices": self.devices, "mesh": sizes, "host": host}

    def variables(self, rank: int, coordinator: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Makes the environment variables of a process.

        Args:
            coordinator: HOST:PORT of the coordinator.
            environment: the environment variables that the process inherits.
        """
        variables = {name: value for name, value in environment.items() if name not in OWN}
        # The number of devices is the group's.
        variables["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", variables.get("XLA_FLAGS", "")).strip()
        # Into a pipe Python would print by blocks.
        variables.setdefault("PYTHONUNBUFFERED", "1")
        if not self.gpus:
            variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}
        if self.processes > 1:
            variables |= {"ARGOSY_COORDINATOR": coordinator, "ARGOSY_PROCESSES": str(self.processes), "ARGOSY_RANK": str(rank)}
        return variables | dict(self.environment)


