"""Runs a command as processes on a Ray cluster, and restarts all of them when one fails, by the rules of `launch.local`.

Each process is the child of an actor. All actors are in one placement group, so that either all find room or none starts. An actor
forwards signals to its process, and the output of the process to the driver. If an actor dies or its machine is lost, its process
counts as killed. The process notices that its parent is gone, saves and ends. All actors end with the driver, which is this command.

Ray Train's JaxTrainer is not used: it starts a worker again whatever its exit code was, and ends workers without time to save
(docs/decisions/0021-on-ray-actors-start-processes.md). This is the only module that imports ray.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from argosy.core.command import install_extra
from argosy.core.errors import ATTEMPT, SUPERVISED, ArgosyError, BadInput, Unsupported
from argosy.core.process import signals
from argosy.core.process.cores import core_count
from argosy.core.progress import Say
from argosy.launch.cluster import PARENT, STACKS, STUCK, with_port
from argosy.launch.local import LocalGang, LocalProcess, supervise
from argosy.launch.ports import HeldPort
from argosy.launch.settings import Ray

# Variables of this process that those of the run get too, beside what the actors have.
PASSED_ON = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "ARGOSY_")
# How long an actor waits for something to tell.
LOOK_S = 0.5
# How long it waits for what an ended process printed last.
LAST_S = 2.0


def ray() -> Any:
    """Returns the Ray library."""
    return import_module("ray")


class Host:
    """The Ray actor that starts one process, and reports its output and its end. Its methods run in threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[bytes] = []
        self._news = threading.Condition()
        self._read = False
        self._port: HeldPort | None = None
        self._stacks = Path(tempfile.mkdtemp(prefix="argosy-"), "stacks")

    def address(self) -> tuple[str, int]:
        """Returns the address of this machine, and a port that this actor reserves."""
        self._port = self._port or HeldPort("")
        return ray().util.get_node_ip_address(), self._port.number

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Starts the process, in `folder` if this machine has it."""
        variables = {**os.environ, **environment, PARENT: str(os.getpid()), STACKS: str(self._stacks)}
        self._process = subprocess.Popen(
            words, env=variables, cwd=folder if Path(folder).is_dir() else None, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._read = True
            self._news.notify_all()

    def news(self) -> tuple[list[bytes], int | None, str]:
        """Returns new lines of output, the exit code with the last lines (otherwise None), and the requested stack traces. Waits
        briefly if there is nothing new."""
        assert self._process is not None
        with self._news:
            self._news.wait_for(lambda: self._lines or self._read, LOOK_S)
            code = self._process.poll()
            if code is not None:
                # A process that it left behind may keep the pipe open.
                self._news.wait_for(lambda: self._read, LAST_S)
            lines, self._lines = self._lines, []
        if code is None:
            return lines, None, ""
        stacks = self._stacks.read_text() if self._stacks.exists() else ""
        shutil.rmtree(self._stacks.parent, ignore_errors=True)
        return lines, code, stacks

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class RayProcess:
    """The process of an actor, with those methods of a Popen that a group needs. Iterating over `stdout` reads its lines."""

    def __init__(self, actor: Any):
        self.actor, self.stacks = actor, ""
        self._code: int | None = None
        self._over = threading.Event()
        self.stdout = self

    def __enter__(self) -> "RayProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def __iter__(self) -> Iterator[bytes]:
        while self._code is None:
            try:
                lines, code, self.stacks = ray().get(self.actor.news.remote())
            except Exception as error:
                # The actor, or its machine, is gone.
                yield f"{(str(error).splitlines() or [type(error).__name__])[0][:200]}\n".encode()
                lines, code = [], -signal.SIGKILL
            yield from lines
            self._code = code if self._code is None else self._code

    def poll(self) -> int | None:
        return self._code

    def wait(self) -> int | None:
        self._over.wait(10)
        return self._code

    def send_signal(self, number: int) -> None:
        with suppress(Exception):
            self.actor.signal.remote(int(number))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RayGang(LocalGang):
    """The group of processes of one start, on a Ray cluster."""

    def __init__(self, words: Sequence[str], settings: Ray, attempt: int):
        self.settings, self.folder = settings, Path(tempfile.mkdtemp(prefix="argosy-"))
        self.logs = Path(settings.logs) if settings.logs is not None else None
        self.members: list[LocalProcess] = []
        self._actors, self._group = place_actors(settings)
        try:
            hosts = ray().get([actor.address.remote() for actor in self._actors])
            alone = len({host for host, _ in hosts}) == 1
            host, port = hosts[0]
            variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
            variables |= {"ARGOSY_COORDINATOR": f"127.0.0.1:{port}" if alone else with_port(f"{host}:{port}")}
            variables |= {"ARGOSY_PROCESSES": str(settings.processes), ATTEMPT: str(attempt)}
            variables |= {STUCK: str(settings.stuck), SUPERVISED: "1"}
            if not settings.gpus:
                variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(settings.devices or 1)}
            starts = [
                actor.start.remote(list(words), variables | {"ARGOSY_RANK": str(rank)}, os.getcwd())
                for rank, actor in enumerate(self._actors)
            ]
            ray().get(starts)
            for rank, actor in enumerate(self._actors):
                process: Any = RayProcess(actor)
                member = LocalProcess(rank, process)
                member.reader = threading.Thread(target=self._read, args=(member,), daemon=True)
                self.members.append(member)
                member.reader.start()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, ArgosyError):
                problem = f"Ray could not start the processes: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
                raise ArgosyError(problem) from None
            raise

    def _said_in_stacks(self, member: LocalProcess) -> str:
        process: Any = member.process
        return process.stacks

    def close(self) -> None:
        with suppress(Exception):
            for actor in self._actors:
                ray().kill(actor)
        with suppress(Exception):
            ray().util.remove_placement_group(self._group)


def place_actors(settings: Ray, kind: type = Host) -> tuple[list[Any], Any]:
    """Starts one actor per process. Returns the actors, in the order of ranks, and their placement group.

    Args:
        kind: the class of the actors.

    Raises:
        ArgosyError: the cluster has no room for all actors in time.
    """
    need = {"CPU": settings.cpus} | ({"GPU": settings.gpus} if settings.gpus else {})
    strategy = "STRICT_SPREAD" if settings.spread else "PACK"
    group = ray().util.placement_group([need] * settings.processes, strategy=strategy)
    try:
        ray().get(group.ready(), timeout=settings.wait)
    except Exception as error:
        ray().util.remove_placement_group(group)
        if type(error).__name__ != "GetTimeoutError":
            raise
        problem = f"Ray has no room for {settings.processes} processes with {need} each after {settings.wait:.0f} s"
        has = {name: count for name, count in ray().cluster_resources().items() if name in ("CPU", "GPU")}
        raise ArgosyError(problem, where=f"the cluster has {has}", hint="ask for less, or wait=SECONDS for longer") from None
    actor_class, strategies = ray().remote(kind), import_module("ray.util.scheduling_strategies")
    actors = [
        actor_class.options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, max_concurrency=4, max_restarts=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(settings.processes)
    ]  # fmt: skip
    return actors, group


@contextmanager
def connect_ray(at: str | None, slots: int, needs: str = "engine=ray", install: str | None = None) -> Iterator[None]:
    """A context with a connection to Ray.

    Args:
        at: the address of a cluster; None: the address in RAY_ADDRESS, or a new Ray on this machine.
        slots: the smallest number of cores that a new Ray pretends to have, so that processes can share the cores of a small machine.
        needs: the setting that needs Ray, for errors.
        install: the command that installs Ray, for errors; None: that of the extra `ray`.

    Raises:
        Unsupported: ray is not installed.
        BadInput: no cluster replies at the address.
    """
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    # A Ray of our own tells nobody about it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray()
    except ImportError:
        raise Unsupported(f"{needs} needs Ray, which is not installed", hint=install or install_extra("ray")) from None
    address = at or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    if not address and slots > core_count():
        options["num_cpus"] = slots
    try:
        with warnings.catch_warnings():
            # Ray forks to start its own programs, which replace the copy of this process at once: JAX has no part in them.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray().init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:
        message = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise BadInput(f"no Ray cluster at {address or 'this machine'}: {message}", hint="address=HOST:PORT names it") from None
    finally:
        # Ray's own handler would end this process before the run has saved.
        for number, handler in before.items():
            with suppress(ValueError):
                signal.signal(number, handler)
    try:
        yield
    finally:
        ray().shutdown()


def run(words: Sequence[str], settings: Ray, say: Say, progress: Callable[[], object]) -> int:
    """Runs a command on a Ray cluster as `local.run` does on this machine. Returns its exit code.

    Args:
        words: the command; the program comes first. All machines must have it.
        progress: returns a value that changes when the run makes progress.

    Raises:
        ArgosyError: there is no Ray, or the cluster has no room.
    """
    begun = time.monotonic()
    with connect_ray(settings.address, settings.processes * settings.cpus):
        say(f"connected to Ray after {time.monotonic() - begun:.0f} s; starting {settings.processes} processes")
        return supervise(lambda attempt: RayGang(words, settings, attempt), settings, say, progress)
