"""`argosy predict` in several processes. Process 0 has the HTTP and gRPC servers, and the others follow it."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from argosy.core.process.signals import Stop
from argosy.core.progress import Say
from argosy.export.write import installed_version
from argosy.launch.cluster import LOST, STACKS, PeerLost, as_peer_lost
from argosy.observe.stacks import write_when_asked
from argosy.parallel import processes
from argosy.predict.processes.follower import LeaderLost, ProcessFollower, leader_connection
from argosy.predict.processes.leader import ProcessLeader, ProcessListener

T = TypeVar("T")
NAME = "predict"


def lead(prepare: Callable[[], T]) -> tuple[T, ProcessLeader]:
    """Runs `prepare`, the work of process 0 before models are loaded, and waits for the other processes, which fail if it fails.
    Returns the result and the leader."""
    _prepare()
    listeners, results = list[ProcessListener](), list[T]()

    def address() -> dict[str, object]:
        results.append(prepare())
        listeners.append(ProcessListener(processes.process_address()))
        return listeners[0].address

    processes.broadcast(NAME, address)
    return results[0], ProcessLeader(listeners[0].accept(processes.process_count() - 1), _end_without)


def follow(stop: Stop, say: Say) -> int:
    """Follows process 0 until it ends this one. Returns the exit code.

    Raises:
        PeerLost: another process ended.
    """
    _prepare()

    def no_address() -> dict[str, object]:
        raise AssertionError("process 0 alone has an address")

    connection = leader_connection(processes.broadcast(NAME, no_address), processes.rank())
    try:
        with as_peer_lost():
            return ProcessFollower(connection, lambda: stop.code, say).follow()
    except LeaderLost:
        raise PeerLost("process 0 of this server ended") from None


def _prepare() -> None:
    """Raises: BadInput, FailedElsewhere: processes have different packages."""
    if STACKS in os.environ:
        # Open for as long as the process lives.
        write_when_asked(Path(os.environ[STACKS]).open("a"))  # noqa: SIM115
    versions = {name: installed_version(name) for name in ("argosy", "jax", "jaxlib")}
    processes.check_same_facts(versions, dict.fromkeys(versions, "install the same packages everywhere"))


def _end_without(rank: int) -> None:
    """Ends this process at once, because its programs would wait for the process `rank`, which has ended."""
    with suppress(Exception):
        sys.stderr.write(f"error: process {rank} of this server ended, and a model is split over all of them: all end\n")
        sys.stderr.flush()
    os._exit(LOST)
