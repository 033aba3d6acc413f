"""A save that runs in a thread beside training: one at a time, and a failure is reported by the next one or by `wait`."""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from argosy.checkpoint.failures import root_of
from argosy.checkpoint.saving.memory import Memory
from argosy.checkpoint.saving.pace import REST, Pace
from argosy.core.errors import ArgosyError
from argosy.parallel import processes


class Saving(ABC):
    """What the tiers of checkpoints share. Subclasses `start` what writes a step, which puts its error into `_failure`.

    Args:
        warn: called with a sentence.
        what: is saved, with an article.
        memory: for the copies of a save; tiers share it.
    """

    def __init__(self, warn: Callable[[str], None], what: str = "a checkpoint", memory: Memory | None = None):
        self.warn, self._what = warn, what
        self.memory = Memory() if memory is None else memory
        self._writing: threading.Thread | None = None
        self._rest = REST
        self._pace = Pace(self._rest)
        self._failure: BaseException | None = None

    def reserve(self, weights: dict[str, Any], state: dict[str, Any]) -> threading.Thread:
        """Takes memory for the copies of such a state, in a thread, so that the first save need not."""
        return self.memory.reserve(self.copied(weights, state))

    @abstractmethod
    def copied(self, weights: dict[str, Any], state: dict[str, Any]) -> Counter[int]:
        """{bytes of an array: how many} of what this process copies in a save of such a state."""

    def start(self, write: Callable[..., None], *job: Any) -> None:
        """Writes a step, the first of `job`, in a thread."""
        self._pace = Pace(self._rest)
        self._writing = threading.Thread(target=write, args=job, name=f"{self._what.removeprefix('a ')} {job[0]}")
        self._writing.start()

    def lacks_all(self) -> bool:
        """Whether the run has no checkpoint at all. A local tier does not know."""
        return False

    @abstractmethod
    def retire(self, newest: int) -> None:
        """Removes what is not kept once a step is committed."""

    def retire_or_say(self, newest: int) -> None:
        """`retire`, after a step that is saved whatever becomes of older ones."""
        try:
            self.retire(newest)
        except Exception as error:
            self.warn(f"older checkpoints could not be removed: {root_of(error)}; after the next save this is tried again")

    def settle(self, step: int) -> None:
        """Waits for the previous save, and reports it if it failed. step: of the save that follows."""
        if self._writing is not None and self._writing.is_alive():
            self._rest /= 2
        self.join()
        if self._failure is not None:
            none = "; the run has no checkpoint yet" if self.lacks_all() else ""
            self.warn(f"{self._what} could not be written: {root_of(self._failure)}; trying again with step {step}{none}")
            self._failure = None

    def join(self) -> None:
        """Waits until nothing is being written. A failure is raised by `wait`, not here."""
        if self._writing is not None:
            self._pace.hurry()
            # Where the system had no thread left, it was never started.
            if self._writing.ident is not None:
                self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Waits until nothing is being written, and frees what was kept for the next save."""
        self.join()
        self.memory.free()

    def settle_last(self) -> None:
        """Waits for the previous save, and reports it if it failed; no other follows."""
        self.join()
        if self._failure is not None:
            self.warn(f"{self._what} could not be written: {root_of(self._failure)}")
            self._failure = None

    def wait_for(self, where: str) -> None:
        """Waits until the save under way is committed.

        Raises:
            ArgosyError: the save failed; earlier checkpoints, if there are any, are intact.
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            # A save fails in all processes.
            processes.fail_together()
            remedy = "free some space or fix the permissions" if isinstance(failure, OSError) else "mend that"
            kept = "the run has no checkpoint, and starts anew" if self.lacks_all() else "earlier checkpoints are intact"
            raise ArgosyError(
                f"{self._what} could not be written: {root_of(failure)}",
                where=where,
                hint=f"{kept}; {remedy}, and run the same command again",
            ) from failure
