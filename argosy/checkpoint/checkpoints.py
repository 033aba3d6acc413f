"""A run's checkpoints: `checkpoints/<step>/` holds weights, optimizer, random streams, data position and settings, committed
together (`step.layout` names the files).

Every process of the run makes the same calls. A run may have one process or several.

    save      leader   removes unfinished files of a killed process
              each     writes and hashes the shards of its own devices
              leader   collects the hashes; writes the arrays' metadata, meta.json, and last the manifest
    verify    each     reads and hashes its part of the files
    read      each     the metadata of the step, and the shards that its devices need

A save copies the arrays off the devices, and a thread writes them while training goes on. If a save fails in one process, the step is
not committed, all processes learn the reason, and the next save is tried as usual. Orbax can read these checkpoints. Beyond Orbax, this
module has the manifest, skips damaged checkpoints, and removes old ones so that no partial checkpoint looks complete.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.checkpoint.alone import ALONE
from argosy.checkpoint.failures import root_of
from argosy.checkpoint.medium.folder import Folder
from argosy.checkpoint.medium.medium import Medium
from argosy.checkpoint.medium.objects import ObjectStore
from argosy.checkpoint.saving.memory import HostCopies, HostMemory
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import META, is_description
from argosy.checkpoint.step.load import read_meta
from argosy.checkpoint.tiers.tier import Tier
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.storage import Store
from argosy.parallel import processes

FAULTS = {kind.__name__: kind for kind in (Damaged, BadInput)}


def medium_of(place: str | Path | Store) -> Medium:
    """Returns the medium (a folder or an object store) of the steps at a path or an address."""
    store = place if isinstance(place, Store) else Store(place)
    return (Folder if store.is_local else ObjectStore)(store)


class Checkpoints(Tier):
    """The checkpoints in a folder or at an address.

    Args:
        place: the folder `checkpoints` of a run directory, or its address.
        settings: which checkpoints to keep. None is for readers, which act without other processes and never remove or rename anything.
        warn: called with a sentence when damage is found.
        memory: host memory for the copies of a save.
    """

    def __init__(
        self,
        place: str | Path | Store,
        settings: CheckpointSettings | None = None,
        warn: Callable[[str], None] = lambda _: None,
        memory: HostMemory | None = None,
    ):
        super().__init__(warn, memory=memory)
        self.medium, self.settings = medium_of(place), settings
        self.store = self.medium.store
        self._group: Any = ALONE if settings is None else processes

    # ---------------------------------------------------------------- list, verify

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        return [step for step in self.medium.steps() if self.medium.is_committed(step)]

    def lacks_all(self) -> bool:
        return not self.steps()

    def latest_good(self, above: int | None = None) -> int | None:
        """Finds the newest step whose files match their manifest. None if there is no checkpoint.

        With settings (in the processes of the run), damaged steps that are found on the way are renamed. A reader changes nothing. If
        retention removes a step while it is being read, the search starts again.

        Args:
            above: a step that is good in another tier. Only newer steps are looked at.

        Raises:
            ArgosyError: a step cannot be reached (permission, network). Nothing is renamed then.
            Damaged: there are checkpoints, but none is good. They are left as they are, so the next call raises the same error.
            FailedElsewhere: the leader raised one of these errors. Raised in the other processes.
        """
        steps = self._group.broadcast("steps", lambda: [step for step in self.steps() if above is None or step > above])
        damaged: dict[int, Damaged] = {}
        good, fault = None, None
        for step in reversed(steps):
            fault = self._fault(step)
            if fault is None:
                good = step
                break
            if not self._group.broadcast("step exists", lambda step=step: self.medium.is_committed(step)):
                return self.latest_good(above)
            if not isinstance(fault, Damaged):
                break
            damaged[step] = fault
        # A step that cannot be reached may be good.
        unreached = None if isinstance(fault, Damaged) else fault
        self._group.broadcast("good step", lambda: self._conclude(steps, damaged, good, unreached, above))
        if good is not None:
            self._group.run_together("step described", lambda: self.path(good))
        return good

    def go_back(self) -> int | None:
        """Returns the newest good step, for a run that returns to it and then takes other steps than before."""
        return self.latest_good()

    def _conclude(
        self, steps: list[int], damaged: Mapping[int, Damaged], good: int | None, unreached: ArgosyError | None, above: int | None
    ) -> None:
        """Renames damaged steps, or raises the error if a step cannot be reached or no step is good."""
        if unreached is not None:
            raise unreached
        newer = good if good is not None else above
        if newer is None and damaged:
            newest = damaged[steps[-1]]
            raise Damaged(
                f"all {len(steps)} checkpoints are damaged; the newest: {newest.what}",
                where=newest.where,
                hint="nothing was changed; restore a copy, or start again in another directory with dir=NEW",
            )
        for step, damage in damaged.items():
            aside = f" and was set aside as {self.medium.set_aside(step)}" if self.settings is not None else ""
            self.warn(f"checkpoint {step} is damaged{aside}: {damage.what} ({damage.where}); using step {newer}")

    def _fault(self, step: int) -> ArgosyError | None:
        """Verifies a step in all processes. Returns the same error in all of them, or None if the step is good."""
        local_fault = self._own_fault(step)
        facts = None if local_fault is None else [type(local_fault).__name__, local_fault.what, local_fault.where, local_fault.hint]
        faults = self._group.all_gather("faults", facts)
        if (first := next((fault for fault in faults if fault is not None), None)) is None:
            return None
        kind, problem, where, hint = first
        return FAULTS.get(kind, ArgosyError)(problem, where=where, hint=hint)

    def _own_fault(self, step: int) -> ArgosyError | None:
        """Verifies this process's part of the files of a step. Returns the error, or None if they are good."""
        count = self._group.process_count()
        try:
            files = self.medium.files(step)
            # The largest files come first, so that no process is left with a large file at the end.
            names = sorted(files, key=lambda name: (-files[name]["bytes"], name))[self._group.rank() :: count]
            # A single process needs all files.
            self.medium.verify(step, {name: files[name] for name in names}, keep=count == 1)
        except ArgosyError as error:
            return error
        # Clients of object stores raise their own classes of errors.
        except Exception as error:
            return ArgosyError(f"cannot be reached: {root_of(error)}", where=f"{self.store.root}/{step}")
        return None

    # ---------------------------------------------------------------- read

    def path(self, step: int) -> Path:
        """Returns the folder of a step on this machine. With several processes it holds the metadata of the step, and the files that
        `prepare` fetched for this process.
        """
        return self.medium.local(step, is_description) if self._group.process_count() > 1 else self.medium.local(step)

    def prepare(self, step: int, shardings: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetches the shards that the devices of this process need.

        Args:
            step: the step.
            shardings: the sharding of each array, {item: {name: sharding}}.

        Raises:
            Damaged: a shard has changed since it was verified.
            OSError: the disk has no space for the shards.
            FailedElsewhere: another process raised one of these errors.
        """
        if self._group.process_count() > 1:
            needed = shards.needed_files(self.path(step), shardings, self.medium.files(step))
            self._group.run_together("shards fetched", lambda: self.medium.local(step, needed.__contains__))

    def meta(self, step: int) -> dict[str, Any]:
        return read_meta(self.medium.local(step, META.__eq__))

    def eval_losses(self) -> dict[int, float]:
        """Returns the evaluation loss of each stored step that was evaluated."""
        losses = {step: self._eval_loss(step) for step in self.steps()}
        return {step: loss for step, loss in losses.items() if loss is not None}

    def _eval_loss(self, step: int) -> float | None:
        """Returns the evaluation loss of a step. None if it was not evaluated, or if its loss cannot be read, because damage to an old
        checkpoint must not prevent a new one."""
        try:
            loss = json.loads(self.store.read_text(f"{step}/{META}")).get("eval_loss")
        except (ArgosyError, ValueError, AttributeError):
            return None
        return loss if isinstance(loss, int | float) else None

    # ---------------------------------------------------------------- commit

    def wait(self) -> None:
        """Waits until the current save is committed.

        Raises:
            ArgosyError: the save failed; earlier checkpoints are intact.
        """
        self.wait_for(self.store.root)

    def is_saved(self, step: int) -> bool:
        # The arrays that the run resumed from are on the devices by now.
        self.medium.release()
        return self._group.broadcast("saved", lambda: self._seems_committed(step))

    def _seems_committed(self, step: int) -> bool:
        """Whether a step is committed. False if the store cannot be reached. The save then fails and is tried again, and the run goes
        on."""
        try:
            return self.medium.is_committed(step)
        except ArgosyError:
            return False

    def write(self, step: int, items: shards.Items, copies: HostCopies, meta: str) -> None:
        group = self._group
        try:
            descriptions, shard_files = shards.description_files(items, meta), shards.shard_files(items)
            group.broadcast("checkpoint begins", lambda: self._begin(step))
            hashes = group.run_together("checkpoint shards", lambda: self.medium.put(step, shard_files, self._pace))
            every = group.all_gather("checkpoint hashes", hashes)

            def commit() -> None:
                files = {name: info for rank_files in every for name, info in rank_files.items()}
                files |= self.medium.put(step, descriptions, self._pace)
                self.medium.commit(step, dict(sorted(files.items())))
                self.retire_or_say(step)

            group.broadcast("checkpoint committed", commit)
            copies.release()
        except BaseException as failure:
            self._failure = failure
            # The unfinished step takes space that the next save may need. If it cannot be removed, it stays without a manifest.
            with suppress(ArgosyError):
                if group.leads() and not self.medium.is_committed(step):
                    self.store.remove(str(step))

    def _begin(self, step: int) -> None:
        self.medium.sweep()
        # The step is committed after all: the store could not be reached when that was asked.
        if self.medium.is_committed(step):
            self.medium.retire(step, self._pace)

    def retire(self, newest: int) -> None:
        """Removes checkpoints that the settings do not keep. A checkpoint that is being read is removed next time."""
        if self.settings is None:
            return
        steps = self.steps()
        keep = set(steps[-self.settings.keep :]) | {newest}
        if self.settings.keep_every:
            keep |= {s for s in steps if s % self.settings.keep_every == 0}
        if self.settings.keep_best:
            best = sorted((loss, s) for s, loss in self.eval_losses().items())
            keep |= {s for _, s in best[: self.settings.keep_best]}
        for step in set(steps) - keep:
            self.medium.retire(step, self._pace)
