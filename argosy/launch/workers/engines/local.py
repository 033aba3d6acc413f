"""Workers that are processes on this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.launch.local import gpus
from argosy.launch.logs import LogFile, show
from argosy.launch.ports import HeldPort
from argosy.launch.workers.engines.process import Process
from argosy.launch.workers.member import Transport, WorkerProcess
from argosy.launch.workers.settings import Group


class LocalWorkers:
    """Starts workers as processes of this machine.

    Raises:
        BadInput: the groups need more GPUs than there are.
    """

    # Where the controller offers its arrays.
    host = "127.0.0.1"

    def __init__(self, groups: Mapping[str, Group], environment: Mapping[str, str] = os.environ):
        self.groups, self.environment = dict(groups), dict(environment)
        self._cards: dict[tuple[str, int], list[str]] = {}
        # Of the last start of each group.
        self._ports: dict[str, HeldPort] = {}
        there, gpu_count = gpus(self.environment), 0
        for name, group in self.groups.items():
            for rank in range(group.processes if group.gpus else 0):
                self._cards[name, rank] = there[gpu_count : gpu_count + group.devices]
                gpu_count += group.devices
        if gpu_count > len(there):
            raise BadInput(f"the groups want {gpu_count} GPUs, and this machine has {len(there)}")

    def __call__(self, name: str, members: Sequence[WorkerProcess]) -> list[Transport]:
        # The processes of the start before have ended.
        if name in self._ports:
            self._ports[name].close()
        self._ports[name] = HeldPort()
        group, coordinator = self.groups[name], f"127.0.0.1:{self._ports[name].number}"
        started: list[Transport] = []
        try:
            for member in members:
                variables = group.variables(member.rank, coordinator, self.environment)
                if (name, member.rank) in self._cards:
                    variables |= {"CUDA_VISIBLE_DEVICES": ",".join(self._cards[name, member.rank])}
                hello = group.hello(name, member.rank, "127.0.0.1")
                callbacks = (member.heard, member.prints, member.ended)
                started.append(Process(hello, variables, os.getcwd(), sys.path, *callbacks))
        except BaseException:
            for transport in started:
                transport.kill()
            raise
        return started


class Printer:
    """Writes the output lines of a group to files, or to stderr."""

    def __init__(self, name: str, logs: str | Path | None):
        self.name, self.logs = name, logs
        self._files: dict[int, LogFile] = {}

    def line(self, rank: int, line: str) -> None:
        """Writes a line. It never raises, because the thread that reads a process's pipe must go on."""
        if self.logs is None:
            show(f"[{self.name} {rank}] {line}\n".encode(errors="replace"))
            return
        if rank not in self._files:
            self._files[rank] = LogFile(Path(self.logs, f"{self.name}-{rank}.log"))
        self._files[rank].write(f"{line}\n".encode(errors="replace"))


