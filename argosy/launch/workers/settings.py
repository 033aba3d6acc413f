"""What a group of workers consists of."""

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
    """What a group consists of.

    Args:
        processes: their number. Inline all are one.
        devices: number of devices of each process: CPU devices, unless it has GPUs.
        gpus: whether these devices are GPUs; inline the devices are those that there are.
        mesh: names and sizes of the mesh over the devices of all processes; at most one size is -1, the rest.
        start: `module:function` or a function, called first in every process in every life of the group, with its arguments:
            `("mine:build", 3)`. What it returns is `workers[NAME].started`.
        stuck: seconds after which a call counts as stuck, and the group is ended; None: calls may take as long as they take. Moves and
            values that are brought never count.
        restarts: how often the group is started again by itself after a death. Calls that were pending still raise.
        environment: variables of its processes.
        cpus: CPUs that Ray reserves for each process.
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
        BadInput: a value cannot be.
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
        """The function that is called first, and its arguments."""
        function, *arguments = self.start if isinstance(self.start, tuple | list) else (self.start,)
        return function, tuple(arguments)

    def hello(self, name: str, rank: int, host: str) -> dict[str, Any]:
        """What a process is told first."""
        sizes = sizes_of(self.mesh, self.processes * self.devices, f"group `{name}`")
        who = {"group": name, "rank": rank, "processes": self.processes}
        return who | {"devices": self.devices, "mesh": sizes, "host": host}

    def variables(self, rank: int, coordinator: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process."""
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


