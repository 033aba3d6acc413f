"""Errors of workers, as the controller raises them."""

from collections.abc import Sequence

from argosy.core.errors import ArgosyError

# Lines of a process that an error shows.
SHOWN = 12


class WorkerError(ArgosyError):
    """A function raised in a worker.

    group, rank: the worker.
    traceback: the text of its traceback.
    """

    def __init__(self, what: str, group: str, rank: int, traceback: str, hint: str | None = None):
        self.group, self.rank, self.traceback = group, rank, traceback
        super().__init__(f"{what}\n\n{traceback.rstrip()}", where=f"in process {rank} of the group `{group}`", hint=hint)


class WorkerLost(ArgosyError):
    """A process of a group ended, or did not reply in time. The group and its values are lost.

    group, rank: the process.
    code: its exit code, negative if a signal ended it; None if it was ended because it did not reply.
    printed: its last lines of output.
    meant: whether the controller ended it on purpose.
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
        """A copy of this error: raising the same exception repeatedly would make its traceback grow."""
        return WorkerLost(self.why, self.group, self.rank, self.code, self.printed, self.meant)
