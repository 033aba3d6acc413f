"""The tiers of a run's checkpoints: what all of them do, and a run that has two.

    persistent    checkpoints/ of the run directory, a folder or an object store      every `checkpoint.every` steps
    local         a folder on a fast disk of each host                                every `checkpoint.local_every` steps

A run resumes from the newest step that is good in any tier. A step is in one tier: what goes to the persistent one is not written to
the local one as well. Signals and the end of a run save to the persistent tier, after which the local one is emptied.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from argosy.checkpoint.step.layout import Arrays
from argosy.checkpoint.store import Checkpoints
from argosy.checkpoint.tiers.local import LocalCheckpoints


class Tier(Protocol):
    """Commit, list, verify, read, retire. Of several processes, all make the same calls."""

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        """Commits a step, in a thread; returns when the arrays are copied."""
        ...

    def steps(self) -> list[int]:
        """Lists what is committed, oldest first."""
        ...

    def agreed_good(self) -> int | None:
        """Verifies, newest first: the newest step whose files match their manifest, the same in all processes."""
        ...

    def path(self, step: int) -> Path:
        """Where the files of a step can be read."""
        ...

    def prepare(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Brings what this process will read of a step to its path. wanted: {item: {name: sharding}}."""
        ...

    def retire(self, newest: int) -> None:
        """Removes what is not kept once a step is committed."""
        ...


class Tiers:
    """Checkpoints in two tiers, with the methods of `Checkpoints`; of the local one only what resuming takes."""

    def __init__(self, persistent: Checkpoints, local: LocalCheckpoints):
        self.persistent, self.local = persistent, local
        self.store, self.warn = persistent.store, persistent.warn
        self.steps, self.eval_losses, self.latest_good = persistent.steps, persistent.eval_losses, persistent.latest_good
        self._resumes: int | None = None
        self._of_persistent: Tier = persistent
        self._of_local: Tier = local

    def agreed_good(self) -> int | None:
        """The newest good step of any tier. Persistent ones that are older than the newest local one are not read."""
        found = self._of_local.agreed_good()
        newer = self.persistent.agreed_good(above=found)
        self._resumes = found if newer is None else None
        if self._resumes is None:
            self.local.dismiss()
        else:
            self.warn(f"the newest good checkpoint is a local one, of step {found}")
        return newer if newer is not None else found

    def go_back(self) -> int | None:
        """The newest good persistent step. Local ones after it are removed: a run that goes back makes other steps than they are."""
        good = self.persistent.agreed_good()
        if good is not None:
            self.local.drop_newer(good)
        self._resumes = None
        return good

    def _tier(self, step: int) -> Any:
        return self.local if step == self._resumes else self.persistent

    def path(self, step: int) -> Path:
        return self._tier(step).path(step)

    def meta(self, step: int) -> dict[str, Any]:
        return self._tier(step).meta(step)

    def prepare(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        self._tier(step).prepare(step, wanted)

    def reserve(self, weights: Arrays, state: Arrays) -> threading.Thread:
        """Takes memory for the copies of a save, in a thread. The tiers share it."""
        return self.persistent.memory.reserve(self.persistent.copied(weights, state) | self.local.copied(weights, state))

    def save(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        self._of_persistent.save(step, weights, state, meta, data)

    def save_local(
        self, step: int, weights: Arrays, state: Arrays, meta: Mapping[str, Any], data: Arrays | None = None
    ) -> None:
        self._of_local.save(step, weights, state, meta, data)

    def settle(self, step: int) -> None:
        """Waits for the previous saves, and reports those that failed. step: of the save that follows."""
        self.local.settle(step)
        self.persistent.settle(step)

    def join(self) -> None:
        self.local.join()
        self.persistent.join()

    def close(self) -> None:
        self.local.close()
        self.persistent.close()

    def wait(self) -> None:
        """Waits for both, and empties the local tier if the persistent one has its newest step or a newer one.

        Raises:
            ArgosyError: the persistent save failed. What is local stays, and is resumed from.
        """
        self.local.settle_last()
        self.persistent.wait()
        if max(self.persistent.steps(), default=-1) >= max(self.local.own_steps(), default=-1):
            self.local.clear()
