"""The interface and the common code of the tiers of a run's checkpoints. A save runs in a thread while training goes on, one at a time.
The next save or `wait` reports a failure.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.failures import root_of
from argosy.checkpoint.saving.memory import HostCopies, HostMemory
from argosy.checkpoint.saving.pace import REST, SavePace
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import DATA, STATE, WEIGHTS, Arrays
from argosy.core.errors import ArgosyError
from argosy.parallel import processes


class Tier(ABC):
    """Commits, lists, verifies, reads and removes checkpoints. All processes of a run make the same calls.

    Args:
        warn: called with a sentence about failures and damage.
        noun: the name of a checkpoint of this tier in messages, with an article.
        memory: the host memory for the copies of a save, which tiers may share.
    """

    # Whether every process writes each shard that its devices hold. Otherwise only one process writes each shard.
    replicates = False

    def __init__(self, warn: Callable[[str], None], noun: str = "a checkpoint", memory: HostMemory | None = None):
        self.warn, self._noun = warn, noun
        self.memory = HostMemory() if memory is None else memory
        self._writing: threading.Thread | None = None
        self._rest = REST
        self._pace = SavePace(self._rest)
        self._failure: BaseException | None = None

    @abstractmethod
    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""

    @abstractmethod
    def latest_good(self) -> int | None:
        """Returns the newest step whose files match their manifest, the same in all processes. None if there is none."""

    @abstractmethod
    def path(self, step: int) -> Path:
        """Returns the folder from which the files of a step can be read."""

    @abstractmethod
    def meta(self, step: int) -> dict[str, Any]:
        """Returns the metadata saved with a step."""

    @abstractmethod
    def prepare(self, step: int, shardings: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetches the files of a step that this process will read to the folder `path(step)`. `shardings`: the sharding of each array,
        {item: {name: sharding}}."""

    @abstractmethod
    def is_saved(self, step: int) -> bool:
        """Whether a step is already committed. This is asked before each save."""

    @abstractmethod
    def write(self, step: int, items: shards.Items, copies: HostCopies, meta: str) -> None:
        """Writes and commits a step, in the thread of a save. Stores an error in `_failure`."""

    @abstractmethod
    def retire(self, newest: int) -> None:
        """Removes steps that are not to be kept, after the step `newest` is committed."""

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        """Starts a save and returns when the arrays are copied.

        If the previous save failed, the failure is reported and this save is still tried, because a full disk may have space again.

        Args:
            weights, state: the arrays of the model, and of the optimizer and the other state, by name.
            meta: the metadata of the step, a JSON object.
            data: the arrays of the position in the data.
        """
        self.settle(step)
        if self.is_saved(step):
            return
        arrays = {WEIGHTS: weights, STATE: state} | ({DATA: data} if data else {})
        copies = self.memory.copies()
        items = shards.copy_shards(arrays, copies, self.replicates or processes.leads(), self.replicates)
        self._pace = SavePace(self._rest)
        job = (step, items, copies, json.dumps(dict(meta), indent=1))
        self._writing = threading.Thread(target=self.write, args=job, name=f"{self._noun.removeprefix('a ')} {step}")
        self._writing.start()

    def copied(self, weights: Arrays, state: Arrays) -> Counter[int]:
        """Returns the sizes of the copies that this process makes in a save: {bytes of a copy: number of copies}."""
        return shards.copied_sizes({WEIGHTS: weights, STATE: state}, self.replicates)

    def reserve(self, weights: Arrays, state: Arrays) -> threading.Thread:
        """Allocates memory for the copies of such a state in a thread, so that the first save does not wait for it."""
        return self.memory.reserve(self.copied(weights, state))

    def lacks_all(self) -> bool:
        """Whether the run is known to have no checkpoint. A local tier cannot know that, and returns False."""
        return False

    def retire_or_say(self, newest: int) -> None:
        """Calls `retire` and reports its errors as warnings, because the new step is saved even if older ones cannot be removed."""
        try:
            self.retire(newest)
        except Exception as error:
            self.warn(f"older checkpoints could not be removed: {root_of(error)}; after the next save this is tried again")

    def settle(self, step: int) -> None:
        """Waits for the previous save, and warns if it failed.

        Args:
            step: the step of the next save, for the warning.
        """
        if self._writing is not None and self._writing.is_alive():
            self._rest /= 2
        self.join()
        if self._failure is not None:
            none = "; the run has no checkpoint yet" if self.lacks_all() else ""
            self.warn(f"{self._noun} could not be written: {root_of(self._failure)}; trying again with step {step}{none}")
            self._failure = None

    def join(self) -> None:
        """Waits until nothing is being written. Raises nothing: `wait` raises a failure."""
        if self._writing is not None:
            self._pace.hurry()
            # The thread was never started if the system had none left.
            if self._writing.ident is not None:
                self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Waits until nothing is being written, and frees the memory for the next save."""
        self.join()
        self.memory.free()

    def settle_last(self) -> None:
        """Waits for the last save, and warns if it failed."""
        self.join()
        if self._failure is not None:
            self.warn(f"{self._noun} could not be written: {root_of(self._failure)}")
            self._failure = None

    def wait_for(self, where: str) -> None:
        """Waits until the current save is committed.

        Args:
            where: the place of the checkpoints, for errors.

        Raises:
            ArgosyError: the save failed. Earlier checkpoints, if there are any, are intact.
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            # A save fails in all processes.
            processes.fail_together()
            remedy = "free some space or fix the permissions" if isinstance(failure, OSError) else "mend that"
            status = "the run has no checkpoint, and starts anew" if self.lacks_all() else "earlier checkpoints are intact"
            raise ArgosyError(
                f"{self._noun} could not be written: {root_of(failure)}",
                where=where,
                hint=f"{status}; {remedy}, and run the same command again",
            ) from failure
