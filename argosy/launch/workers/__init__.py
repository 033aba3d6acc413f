"""One controller and many workers: the controller calls functions in groups of worker processes. Results stay in the group. Arrays are
moved from group to group without passing through the controller.

    with open_workers({"trainer": Group(processes=2, devices=2), "rollouts": Group()}) as workers:
        state = workers["trainer"].run("mine:make", 3)
        weights = workers.move(state, to="rollouts")        # `workers.send` sends a pytree of the controller
        print(workers["rollouts"].run("mine:answer", weights, prompts).value())

Every call goes to all processes of a group, which share one mesh (`here().mesh`) and are joined by jax.distributed. A call returns a
reference (`Ref`) to its result at once. Engines differ in where groups run:

    local     processes on this machine
    ray       processes that actors of a Ray cluster start
    inline    this process: each group has some of its devices and a thread. This is for the proxy of Pathways (JAX_PLATFORMS=proxy),
              where one process has all devices

Workers and controller must trust each other, because each can run code in the other.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, UnknownName, nearest
from argosy.core.progress import Say
from argosy.launch.local import check_logs
from argosy.launch.workers.arrays.offers import Offers, send_value
from argosy.launch.workers.arrays.references import GroupLife, Ref
from argosy.launch.workers.engines.here import Here, here
from argosy.launch.workers.engines.local import LocalWorkers, Printer
from argosy.launch.workers.errors import WorkerError, WorkerLost
from argosy.launch.workers.gang import WorkerGang
from argosy.launch.workers.group import WorkerGroup, close_all, move_value
from argosy.launch.workers.settings import Group

__all__ = ["ENGINES", "Group", "Here", "Ref", "WorkerError", "WorkerGroup", "WorkerLost", "Workers", "here", "open_workers"]

ENGINES = ("local", "ray", "inline")
Begin = Callable[[str, Callable[[WorkerLost], None]], GroupLife]


class Workers(Mapping[str, WorkerGroup]):
    """The groups of workers, by name.

    offers: serves the arrays of the controller to groups; None if the groups are in the controller's process.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup], offers: Offers | None = None):
        self._groups, self._offers, self._lock = dict(groups), offers, threading.Lock()

    def __getitem__(self, name: str) -> WorkerGroup:
        if name not in self._groups:
            raise UnknownName("group", name, self._groups)
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def move(self, ref: Ref, to: str, sharding: Any = None) -> Ref:
        """Moves a pytree of one group to another group, from worker to worker. Returns a reference at once. The arrays become jax
        arrays over the mesh of the target group.

        Args:
            ref: the reference to the pytree.
            to: the name of the target group.
            sharding: a PartitionSpec for all arrays, or a pytree of PartitionSpecs that is a prefix of the value; None: replicated.
        """
        group = self[to]
        if not isinstance(ref, Ref):
            raise BadInput(f"{type(ref).__name__} is no Ref of a group", hint="`send` brings a value of this program to a group")
        if ref.group is not self._groups.get(ref.group.name):
            raise BadInput(f"{ref!r} is of other workers")
        return move_value(ref, group, sharding, self._lock)

    def send(self, value: Any, to: str, sharding: Any = None) -> Ref:
        """Sends a pytree of the controller to a group, which fetches its arrays. Returns a reference at once. Until `wait` of the
        reference returns, the arrays must not be donated or changed. They become jax arrays over the mesh of the group.

        Args:
            value: a pytree of arrays and plain values.
            to: the name of the group.
            sharding: as in `move`.

        Raises:
            BadInput: the pytree has other leaves, or an array is not complete in this process.
        """
        return send_value(value, self[to], sharding, self._offers)


@contextmanager
def open_workers(
    groups: Mapping[str, Group], engine: str = "local", *, logs: str | Path | None = None, address: str | None = None,
    wait: float = 60.0, say: Say | None = None,
) -> Iterator[Workers]:  # fmt: skip
    """Starts groups of workers, which end with the `with` block.

    Args:
        groups: the groups, by name.
        engine: `local`, `ray` or `inline`.
        logs: the folder for the output of each process, in files `GROUP-RANK.log`; None: output is printed on stderr, with its origin.
        address: the address of the Ray cluster; None: RAY_ADDRESS, or a new Ray on this machine.
        wait: the time to wait for room on the Ray cluster, in seconds.
        say: called, from threads, with messages about groups; None: messages are printed on stderr.

    Raises:
        BadInput: the settings of a group are invalid.
        Unsupported: a library that the engine needs is not installed.
        WorkerLost: a process ended before it had joined its group.
        WorkerError: a `start` function raised.
    """
    if engine not in ENGINES:
        raise BadInput(f"engine={engine!r}", hint=nearest(str(engine), ENGINES))
    if not groups:
        raise BadInput("there are no groups")
    for name, group in groups.items():
        if not isinstance(group, Group):
            raise BadInput(f"the group `{name}` is {group!r}", hint=f'{{"{name}": Group(processes=2)}}')
        group.check(name)
    options = {"address": (address, engine == "ray"), "logs": (logs, engine != "inline")}
    for name, (value, takes) in options.items():
        if value is not None and not takes:
            raise BadInput(f"engine={engine} takes no {name}=")
    if logs is not None:
        check_logs(Path(logs))
    with ExitStack() as stack:
        begin, offers = _engine(engine, groups, logs, address, wait, stack)
        if offers is not None:
            stack.callback(offers.close)
        worker_groups: dict[str, WorkerGroup] = {}
        try:
            for name, group in groups.items():
                start = group.started_with if group.start is not None else None
                worker_groups[name] = WorkerGroup(name, partial(begin, name), start, group.restarts, say or _say)
            # All start at the same time.
            for opened in [group.open() for group in worker_groups.values()]:
                opened.result()
            yield Workers(worker_groups, offers)
        finally:
            close_all(worker_groups.values())


def _engine(
    engine: str, groups: Mapping[str, Group], logs: str | Path | None, address: str | None, wait: float, stack: ExitStack
) -> tuple[Begin, Offers | None]:
    """Returns a function that starts a group, and the server of the controller's arrays; None if groups are in the controller's
    process.
    """
    if engine == "inline":
        from argosy.launch.workers.engines.inline import inline

        return inline(groups), None
    if engine == "ray":
        from argosy.launch.workers.engines.ray import RayWorkers

        starts: Any = stack.enter_context(RayWorkers(groups, address, wait))
    else:
        starts = LocalWorkers(groups)

    def begin(name: str, died: Callable[[WorkerLost], None]) -> GroupLife:
        return WorkerGang(name, groups[name].processes, starts, groups[name].stuck, Printer(name, logs).line, died)

    return begin, Offers(starts.host)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
