"""Checkpoints of a run in two tiers.

    persistent    checkpoints/ of the run directory, a folder or an object store      every `checkpoint.every` steps
    local         a folder on a fast disk of each host                                every `checkpoint.local_every` steps

A run resumes from the newest step that is good in any tier. Each step is in one tier: a step that is saved to the persistent tier is
not also written to the local one. Signals and the end of a run save to the persistent tier, and then the local tier is emptied.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.step.layout import Arrays
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.checkpoint.tiers.tier import Tier


class TieredCheckpoints:
    """Checkpoints in two tiers, with the methods of `Checkpoints`. Steps of the local tier are used only to resume."""

    def __init__(self, persistent: Checkpoints, local: LocalCheckpoints):
        self.persistent, self.local = persistent, local
        self.store, self.warn = persistent.store, persistent.warn
        self.steps, self.eval_losses = persistent.steps, persistent.eval_losses
        self.save, self.save_local = persistent.save, local.save
        self._resumes: int | None = None

    def latest_good(self) -> int | None:
        """Returns the newest good step of any tier. Persistent steps that are older than the newest good local one are not read."""
        local_step = self.local.latest_good()
        newer = self.persistent.latest_good(above=local_step)
        self._resumes = local_step if newer is None else None
        if self._resumes is None:
            self.local.dismiss()
        else:
            self.warn(f"the newest good checkpoint is a local one, of step {local_step}")
        return newer if newer is not None else local_step

    def go_back(self) -> int | None:
        """Returns the newest good persistent step, and removes newer local steps, because a run that goes back takes other steps."""
        good = self.persistent.latest_good()
        if good is not None:
            self.local.drop_newer(good)
        self._resumes = None
        return good

    def _tier(self, step: int) -> Tier:
        return self.local if step == self._resumes else self.persistent

    def path(self, step: int) -> Path:
        return self._tier(step).path(step)

    def meta(self, step: int) -> dict[str, Any]:
        return self._tier(step).meta(step)

    def prepare(self, step: int, shardings: Mapping[str, Mapping[str, Any]]) -> None:
        self._tier(step).prepare(step, shardings)

    def reserve(self, weights: Arrays, state: Arrays) -> threading.Thread:
        """Allocates memory for the copies of a save in a thread. The tiers share it."""
        return self.persistent.memory.reserve(self.persistent.copied(weights, state) | self.local.copied(weights, state))

    def settle(self, step: int) -> None:
        """Waits for the previous saves, and warns about those that failed.

        Args:
            step: the step of the next save.
        """
        self.local.settle(step)
        self.persistent.settle(step)

    def join(self) -> None:
        self.local.join()
        self.persistent.join()

    def close(self) -> None:
        self.local.close()
        self.persistent.close()

    def wait(self) -> None:
        """Waits for the saves of both tiers. Empties the local tier if it has no newer step than the persistent one.

        Raises:
            ArgosyError: the persistent save failed. The local steps stay, so that the run can resume from them.
        """
        self.local.settle_last()
        self.persistent.wait()
        if max(self.persistent.steps(), default=-1) >= max(self.local.own_steps(), default=-1):
            self.local.clear()
