"""Errors of workers, as the controller raises them."""

from collections.abc import Sequence

from argosy.core.errors import ArgosyError

# Lines of a process that an error shows.
SHOWN = 12


class WorkerError(ArgosyError):
    """A function raised in a worker.

    group, rank: the group and the rank of the worker.
    traceback: the traceback in the worker, as text.
    """

    def __init__(self, what: str, group: str, rank: int, traceback: str, hint: str | None = None):
        self.group, self.rank, self.traceback = group, rank, traceback
        super().__init__(f"{what}\n\n{traceback.rstrip()}", where=f"in process {rank} of the group `{group}`", hint=hint)


class WorkerLost(ArgosyError):
    """A process of a group ended, or did not reply in time. The group and its values are lost.

    group, rank: the group and the rank of the process.
    code: the exit code, which is negative if a signal ended the process; None if the process was killed because it did not reply.
    printed: the last lines of its output.
    meant: whether the controller ended the process on purpose.
    """

    def __init__(
        self, why: str, group: str, rank: int, code: int | None = None, printed: Sequence[str] = (), meant: bool = False
    ):
        self.group, self.rank, self.code, self.why, self.meant = group, rank, code, why, meant
        self.printed = [line for line in printed if line.strip()][-SHOWN:]
        tail = "".join(f"\n  [{group} {rank}] {line}" for line in self.printed)
        problem = f"process {rank} of the group `{group}` {why}{tail}"
        super().__init__(problem, hint=f'workers["{group}"].restart() starts the group again; what it held is gone')

    def again(self) -> "WorkerLost":
        """Returns a copy of this error. Raising the same exception object repeatedly would make its traceback grow."""
        return WorkerLost(self.why, self.group, self.rank, self.code, self.printed, self.meant)
