"""What goes wrong in workers, as the controller raises it."""

from collections.abc import Sequence

from argosy.core.errors import ArgosyError

# Lines of a process that an error shows.
SHOWN = 12


class WorkerError(ArgosyError):
    """A function raised in a worker. group, rank: where; traceback: its text, as the worker would have printed it."""

    def __init__(self, what: str, group: str, rank: int, traceback: str, hint: str | None = None):
        self.group, self.rank, self.traceback = group, rank, traceback
        super().__init__(f"{what}\n\n{traceback.rstrip()}", where=f"in process {rank} of the group `{group}`", hint=hint)


class WorkerLost(ArgosyError):
    """A process of a group ended, or did not answer in time, and with it the group and what it held.

    group, rank: which. code: its exit code, negative where a signal ended it; None where it was ended because it did not answer.
    printed: the last lines that it printed. meant: whether the controller ended it on purpose.
    """

    def __init__(
        self, why: str, group: str, rank: int, code: int | None = None, printed: Sequence[str] = (), meant: bool = False
    ):
        self.group, self.rank, self.code, self.why, self.meant = group, rank, code, why, meant
        self.printed = [line for line in printed if line.strip()][-SHOWN:]
        shown = "".join(f"\n  [{group} {rank}] {line}" for line in self.printed)
        what = f"process {rank} of the group `{group}` {why}{shown}"
        super().__init__(what, hint=f'workers["{group}"].restart() starts the group again; what it held is gone')

    def again(self) -> "WorkerLost":
        """A new exception that says the same: one that is raised twice gets a longer and longer traceback."""
        return WorkerLost(self.why, self.group, self.rank, self.code, self.printed, self.meant)
