"""The controller's side of a group's processes. It sends them requests, and handles the end of a process.

The processes of a group live and die together. If a process ends, or replies with an error while another waits for it in a collective,
all of them are killed, and pending calls raise.
"""

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.launch.local import ending_words
from argosy.launch.workers.arrays.transfers import PeerGone, TransferSource, check_alike
from argosy.launch.workers.arrays.trees import Box, Leaf, together, whole
from argosy.launch.workers.errors import WorkerError, WorkerLost
from argosy.launch.workers.member import Transport, WorkerEnded, WorkerProcess

# How long the others may take to finish a call that one process has answered with an error.
ALONE_S = 10.0
# How long processes have to end by themselves.
LEAVE_S = 3.0


Start = Callable[[str, Sequence[WorkerProcess]], Sequence[Transport]]


class WorkerGang:
    """The processes of a group, from one start to their end.

    Args:
        start: starts the processes, one for each member.
        stuck: the seconds after which a process that has not replied to a call counts as stuck; None: never.
        died: called once, from a thread, when the group is lost.
    """

    def __init__(
        self,
        name: str,
        processes: int,
        start: Start,
        stuck: float | None,
        print_line: Callable[[int, str], None],
        died: Callable[[WorkerLost], None],
    ):
        self.name, self.stuck = name, stuck
        self.lost: WorkerLost | None = None
        self._died, self._lock = died, threading.Lock()
        self.members = [
            WorkerProcess(rank, lambda line, rank=rank: print_line(rank, line), self._ended) for rank in range(processes)
        ]
        for member, transport in zip(self.members, start(name, self.members)):
            member.transport = transport

    def join(self) -> None:
        """Waits until the processes have joined each other.

        Raises:
            WorkerLost, ArgosyError: a process failed to join.
        """
        try:
            for member, ready in zip(self.members, self._all(dict(enumerate(member.joined for member in self.members)), meet=True)):
                member.address = ready["address"]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [member.transport.pid for member in self.members if member.transport is not None]

    # ---------------------------------------------------------------- deaths

    def _ended(self, member: WorkerProcess) -> None:
        self.lose(WorkerLost(f"ended {ending_words(member.code or 0)}", self.name, member.rank, member.code, list(member.printed)))

    def lose(self, error: WorkerLost) -> None:
        """Kills all processes of the group, and records this error unless there is an earlier one."""
        with self._lock:
            first, self.lost = self.lost is None, self.lost or error
        for member in self.members:
            if member.transport is not None and member.code is None:
                member.transport.kill()
        if first:
            self._died(error)

    def check(self) -> None:
        """Checks that all processes are alive.

        Raises:
            WorkerLost: a process has ended.
        """
        if self.lost is not None:
            raise self.lost.again()

    def close(self) -> None:
        """Ends the processes, and waits for their end."""
        with self._lock:
            self.lost = self.lost or WorkerLost("was ended by its controller", self.name, 0, meant=True)
        for do, patience in (("leave", LEAVE_S), ("kill", LEAVE_S)):
            running = [member for member in self.members if member.transport is not None and member.code is None]
            for member in running:
                with suppress(OSError):
                    getattr(member.transport, do)()
            until = time.monotonic() + patience
            for member in running:
                member.over.wait(max(0.0, until - time.monotonic()))

    # ---------------------------------------------------------------- questions

    def _all(self, futures: Mapping[int, Future[Any]], stuck: float | None = None, meet: bool = False) -> list[Any]:
        """Waits for the replies of processes, and returns them by rank.

        Args:
            futures: the replies, by rank.
            stuck: the seconds after which a process that has not replied counts as stuck; None: never.
            meet: whether processes may wait for each other, so that one that fails blocks the others.

        Raises:
            WorkerLost: a process ended, or took too long. WorkerError: a function raised.
            ArgosyError: a process replied that the request cannot be fulfilled.
        """
        begun, failed = time.monotonic(), None
        pending, rank_of = set(futures.values()), {future: rank for rank, future in futures.items()}
        while pending:
            until = begun + stuck if stuck is not None else float("inf")
            if failed is not None and meet:
                until = min(until, failed[0] + ALONE_S)
            wait_s = None if until == float("inf") else max(0.0, until - time.monotonic())
            done, pending = wait(pending, timeout=wait_s, return_when=FIRST_COMPLETED)
            if any(isinstance(future.exception(), WorkerEnded) for future in done):
                self.check()
            for future in done:
                if failed is None and "failed" in future.result():
                    failed = time.monotonic(), rank_of[future], future.result()["failed"]
            if not done and pending:
                self._give_up(min(rank_of[future] for future in pending), failed, time.monotonic() - begun)
        if failed is not None:
            raise self._error(failed[1], failed[2])
        return [future.result()["done"] for future in futures.values()]

    def _give_up(self, rank: int, failed: Any, waited: float) -> None:
        if failed is not None:
            why = f"was still in a call {ALONE_S:.0f} s after process {failed[1]} had raised in it, and was ended with its group"
            self.lose(WorkerLost(why, self.name, rank, None, list(self.members[rank].printed)))
            error = self._error(failed[1], failed[2])
            if isinstance(error, WorkerError):
                hint = f'the group was ended: process {rank} did not finish the call; workers["{self.name}"].restart()'
                raise WorkerError(failed[2]["what"], self.name, failed[1], failed[2]["traceback"], hint)
            raise error
        why = f"did not answer within {waited:.0f} s (Group(stuck={self.stuck:g})), and was ended with its group"
        self.lose(WorkerLost(why, self.name, rank, None, list(self.members[rank].printed)))
        self.check()

    def _error(self, rank: int, reply: Mapping[str, Any]) -> ArgosyError:
        kind = {"input": BadInput, "PeerGone": PeerGone, "Damaged": Damaged}.get(reply["kind"])
        if kind is None and reply["kind"] != "raised":
            kind = ArgosyError
        if kind is None:
            return WorkerError(reply["what"], self.name, rank, reply["traceback"])
        where = reply.get("where") or f"in process {rank} of the group `{self.name}`"
        return kind(reply["what"], where=where, hint=reply.get("hint"))

    def _ask(self, kind: str, payload: Any, stuck: float | None = None, meet: bool = False) -> list[Any]:
        self.check()
        return self._all({member.rank: member.ask(kind, payload) for member in self.members}, stuck, meet)

    # ---------------------------------------------------------------- commands

    def call(self, number: int, function: str, arguments: bytes) -> None:
        self._ask("call", {"number": number, "function": function, "arguments": arguments}, self.stuck, meet=True)

    def source(self, number: int) -> TransferSource:
        """Describes a value that is equal in all processes, so that another group can fetch it.

        Raises:
            BadInput: the processes have different values.
        """
        replies: list[tuple[bytes, list[Leaf]]] = self._ask("describe", number)
        check_alike(self.name, [leaves for _, leaves in replies])
        for rank, (skeleton, _) in enumerate(replies):
            if skeleton != replies[0][0] and _as_text(skeleton) != _as_text(replies[0][0]):
                problem = f"what process {rank} of the group `{self.name}` returned differs from what process 0 did"
                raise BadInput(problem, hint="Ref.values() brings that of each")
        addresses = [member.address for member in self.members]
        return TransferSource(self.name, number, replies[0][0], [leaves for _, leaves in replies], addresses)

    def pull(self, number: int, source: TransferSource, sharding: Any) -> int:
        """Fetches a value from another group, and stores it as `number`. Returns the number of bytes received."""
        return sum(self._ask("pull", {"number": number, "source": source, "sharding": pickle.dumps(sharding)}))

    def value(self, number: int) -> Any:
        """Fetches a value with its arrays as numpy arrays. Each byte is transferred once.

        Raises:
            BadInput: the processes have different values, or a leaf is neither an array nor a plain value.
        """
        source = self.source(number)
        requests: dict[int, list[tuple[int, Box]]] = {}
        for index in range(len(source.leaves[0])):
            seen: set[Box] = set()
            for rank, leaves in enumerate(source.leaves):
                requests.setdefault(rank, []).extend((index, box) for box in leaves[index].boxes if box not in seen)
                seen |= set(leaves[index].boxes)
        return self._assemble(source.skeleton, source.leaves[0], number, requests)

    def values(self, number: int) -> list[Any]:
        """Fetches the value of each process. Returns them by rank.

        Raises:
            BadInput: an array is not complete in each process.
        """
        out = []
        for rank, (skeleton, leaves) in enumerate(self._ask("describe", number)):
            for leaf in leaves:
                if leaf.crc is None and len(self.members) > 1 and 0 not in leaf.shape and leaf.boxes != (whole(leaf.shape),):
                    problem = f"{leaf.path} is an array of all processes of the group `{self.name}`"
                    raise BadInput(problem, hint="Ref.value() brings it")
            requests = {rank: [(index, box) for index, leaf in enumerate(leaves) for box in leaf.boxes]}
            out.append(self._assemble(skeleton, leaves, number, requests))
        return out

    def _assemble(self, skeleton: bytes, leaves: Sequence[Leaf], number: int, requests: Mapping[int, list[tuple[int, Box]]]) -> Any:
        import jax
        import numpy as np

        arrays = [np.empty(leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in leaves]
        futures = {rank: self.members[rank].ask("value", {"number": number, "wanted": some}) for rank, some in requests.items()}
        for shards in self._all(futures):
            for index, box, data in shards:
                arrays[index][tuple(slice(*span) for span in box)] = data
        return together(pickle.loads(skeleton), arrays)

    def free(self, numbers: Sequence[int]) -> None:
        for member in self.members:
            member.tell("free", list(numbers))


def _as_text(skeleton: bytes) -> str:
    """Converts a pickled skeleton to a text that is equal for equal skeletons. Equal objects may be pickled differently."""
    import jax

    leaves, structure = jax.tree.flatten(pickle.loads(skeleton))
    return f"{structure} {leaves}"
