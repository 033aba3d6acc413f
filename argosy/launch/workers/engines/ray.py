"""Workers on a Ray cluster. Each worker is the child of an actor, as the processes of a run are (`launch.ray`).

Messages between the controller and a worker pass through the actor, over Ray's own connections. Arrays are sent from worker to worker
directly. If the cluster is one machine, workers listen only on its loopback address.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.launch import ray as engine
from argosy.launch.cluster import with_port
from argosy.launch.ports import HeldPort
from argosy.launch.settings import Ray
from argosy.launch.workers.engines.process import Process
from argosy.launch.workers.member import Transport, WorkerProcess
from argosy.launch.workers.settings import Group

KILLED = -9


class Keeper:
    """The Ray actor that starts one process, and forwards messages in both directions. Its methods run in threads."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._port: HeldPort | None = None
        self._news: list[tuple[str, Any]] = []
        self._some = threading.Condition()

    def address(self) -> tuple[str, int]:
        """Returns the address of this machine, and a port that this actor reserves."""
        self._port = self._port or HeldPort("")
        return engine.ray().util.get_node_ip_address(), self._port.number

    def start(
        self, name: str, group: Group, rank: int, coordinator: str, host: str, passed_on: Mapping[str, str], folder: str,
        paths: list[str],
    ) -> int:  # fmt: skip
        """Starts the process, and returns its id.

        Args:
            name: the name of the group.
            group: the settings of the group.
            rank: the rank of the process.
            coordinator: HOST:PORT of the coordinator.
            host: the address at which the worker listens.
            passed_on: environment variables of the controller.
            folder: the working directory.
            paths: the controller's import paths.
        """
        variables = group.variables(rank, coordinator, {**os.environ, **passed_on})
        callbacks = [self._teller(kind) for kind in ("heard", "prints", "ended")]
        self._process = Process(group.hello(name, rank, host), variables, folder, paths, *callbacks)
        return self._process.pid

    def _teller(self, kind: str) -> Callable[[Any], None]:
        def tell(message: Any) -> None:
            with self._some:
                self._news.append((kind, message))
                self._some.notify_all()

        return tell

    def news(self) -> list[tuple[str, Any]]:
        """Returns new messages and output of the process, and its end. Waits briefly if there is nothing new."""
        with self._some:
            self._some.wait_for(lambda: self._news, engine.LOOK_S)
            news, self._news = self._news, []
        return news

    def do(self, command: str, *arguments: Any) -> None:
        """Calls a method of the process."""
        if self._process is not None:
            getattr(self._process, command)(*arguments)


class RayWorker:
    """The process of an actor, as a group of workers uses it (`Transport`)."""

    def __init__(self, actor: Any, member: WorkerProcess, pid: int):
        self.actor, self.member, self.pid = actor, member, pid
        threading.Thread(target=self._follow, daemon=True).start()

    def send(self, data: bytes) -> None:
        self._do("send", data)

    def kill(self) -> None:
        self._do("kill")

    def leave(self) -> None:
        self._do("leave")

    def _do(self, method: str, *arguments: Any) -> None:
        # An actor that is gone is noticed by `_follow`.
        with suppress(Exception):
            self.actor.do.remote(method, *arguments)

    def _follow(self) -> None:
        while self.member.code is None:
            try:
                news = engine.ray().get(self.actor.news.remote())
            except Exception as error:
                # The actor, or its machine, is gone, and its process with it.
                self.member.prints((str(error).splitlines() or [type(error).__name__])[0][:200])
                news = [("ended", KILLED)]
            for kind, payload in news:
                getattr(self.member, kind)(payload)


class RayWorkers:
    """Starts groups on a Ray cluster, to which this process stays connected."""

    def __init__(self, groups: Mapping[str, Group], address: str | None, wait: float):
        self.groups, self.wait = dict(groups), wait
        count = sum(group.processes for group in groups.values())
        cpus = max(group.cpus for group in groups.values())
        self._connected = engine.connect_ray(address, count * cpus)
        self._placed: dict[str, tuple[list[Any], Any]] = {}

    def __enter__(self) -> "RayWorkers":
        self._connected.__enter__()
        nodes = [node for node in engine.ray().nodes() if node["Alive"]]
        self._alone = len(nodes) == 1
        # Where the controller offers its arrays.
        self.host = "127.0.0.1" if self._alone else engine.ray().util.get_node_ip_address()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self._placed):
            self._give_back(name)
        self._connected.__exit__(None, None, None)

    def __call__(self, name: str, members: Sequence[WorkerProcess]) -> list[Transport]:
        """Starts the processes of a group, and returns them by rank.

        Raises:
            ArgosyError: the cluster has no room for the processes in time, or does not start them.
        """
        self._give_back(name)
        group = self.groups[name]
        gpus = group.devices if group.gpus else 0
        settings = Ray(processes=group.processes, cpus=group.cpus, gpus=gpus, wait=self.wait)
        actors, _ = self._placed[name] = engine.place_actors(settings, Keeper)
        # Ray pickles what it passes on; the modules of functions are the workers' to import.
        plain = replace(group, start=None, mesh=dict(group.mesh), environment=dict(group.environment))
        passed_on = {key: value for key, value in os.environ.items() if key.startswith(engine.PASSED_ON)}
        try:
            hosts = engine.ray().get([actor.address.remote() for actor in actors])
            host, port = hosts[0]
            coordinator = f"127.0.0.1:{port}" if self._alone else with_port(f"{host}:{port}")
            starts = [
                actor.start.remote(
                    name, plain, rank, coordinator, "127.0.0.1" if self._alone else hosts[rank][0], passed_on, os.getcwd(), sys.path
                )
                for rank, actor in enumerate(actors)
            ]
            pids = engine.ray().get(starts)
        except Exception as error:
            self._give_back(name)
            # The last line of a traceback.
            message = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
            raise ArgosyError(f"Ray could not start the group `{name}`: {message}") from None
        return [RayWorker(actor, member, pid) for actor, member, pid in zip(actors, members, pids)]

    def _give_back(self, name: str) -> None:
        if name not in self._placed:
            return
        actors, group = self._placed.pop(name)
        for actor in actors:
            with suppress(Exception):
                engine.ray().kill(actor)
        with suppress(Exception):
            engine.ray().util.remove_placement_group(group)
