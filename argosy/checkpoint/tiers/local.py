"""Checkpoints on the fast disks of the hosts: each process keeps its own shards, and a step counts while all of its files are found.

    <checkpoint.local>/<run>/<rank>/<step>/     a manifest of all files of the step, and those that this process has

Every process writes every shard that its devices hold, copies too: with data parallelism all hosts have everything. With
`local_copies=2` it also keeps the shards of a process on another host. Where a host lost its disk, the processes that need a file fetch
it from one that has it (`tiers.restore`); each reads only what its own devices hold.

A step is committed when its manifest is, in each process after all have written. Two manifests of one step (it was made again) are two
steps: their files are never mixed.
"""

import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.checkpoint.saving.memory import HostCopies, HostMemory
from argosy.checkpoint.saving.pace import SavePace, remove_files
from argosy.checkpoint.step import files as step_files
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.load import read_meta
from argosy.checkpoint.tiers import peers
from argosy.checkpoint.tiers.restore import RestoredStep, StepKey, offer_files, restore_step, steps_on_host
from argosy.checkpoint.tiers.tier import Tier
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput
from argosy.parallel import processes
from argosy.weights import manifest

KEEP = 2
RESTORED = ".restored"


class LocalCheckpoints(Tier):
    """The local tier of this process. All processes make the same calls.

    Args:
        root: the run's folder on this host.
        copies: on how many hosts each shard is kept at least.
        place: the host and its disk, as others tell it apart.
        belongs: (step, its meta) -> whether the run made it on its way to where it is now.
        memory: for the copies of a save.
    """

    replicates = True

    def __init__(
        self,
        root: Path,
        copies: int = 1,
        warn: Any = lambda _: None,
        place: str | None = None,
        belongs: Callable[[int, Mapping[str, Any]], bool] = lambda step, meta: True,
        memory: HostMemory | None = None,
    ):
        super().__init__(warn, "a local checkpoint", memory)
        self.belongs = belongs
        self.root, self.copies = root, copies
        self.folder = root / str(processes.rank())
        self.places = processes.all_gather("local places", place or f"{socket.gethostname()}:{root.absolute()}")
        self._restored: RestoredStep | None = None
        processes.run_together("local folder", self._check)

    def _check(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"checkpoint.local: {self.root}: {(error.strerror or str(error)).lower()}") from None
        hosts = len(set(self.places))
        if self.copies > hosts:
            raise BadInput(f"checkpoint.local_copies={self.copies} needs as many hosts; this run has {plural(hosts, 'host')}")

    # ---------------------------------------------------------------- list, verify

    def steps(self) -> list[int]:
        """Steps of which this host has files, oldest first."""
        return sorted({step for step, _ in self._local_steps()})

    def own_steps(self) -> list[int]:
        """Steps of this process, oldest first. Folders of other processes of the host may vanish at any time when a run ends."""
        return sorted(int(folder.name) for folder in self.folder.iterdir() if folder.name.isdecimal()) if self.folder.is_dir() else []

    def latest_good(self) -> int | None:
        """The newest step of which all files are found and good, over all processes. Newer ones lack some, and are removed."""
        local_steps = self._local_steps()
        every = processes.all_gather("local steps", [f"{step} {digest}" for step, digest in sorted(local_steps)])
        keys = {(int(step), digest) for keys in every for step, digest in map(str.split, keys)}
        for key in sorted(keys, reverse=True):
            home, scratch = self.folder / str(key[0]), self.folder / RESTORED / str(key[0])
            self._restored = restore_step(key, local_steps.get(key, []), home, scratch, self.warn)
            if self._restored is not None:
                self.drop_newer(key[0])
                return key[0]
        self.drop_newer(-1)
        return None

    def _local_steps(self) -> dict[StepKey, list[Path]]:
        """The steps of this host, with their folders, those of this process first."""
        others = (folder for folder in sorted(self.root.iterdir()) if folder != self.folder and folder.is_dir())
        return steps_on_host([self.folder, *others], self.belongs)

    # ---------------------------------------------------------------- read

    def path(self, step: int) -> Path:
        """The folder of the step that was agreed on. It has the shards that this process needs once `prepare` was called."""
        assert self._restored is not None
        assert self._restored.step == step
        return self._restored.folder

    def meta(self, step: int) -> dict[str, Any]:
        return read_meta(self.path(step))

    def prepare(self, step: int, shardings: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetches the shards that the devices of this process need and this host lacks. shardings: {item: {name: sharding}}.

        Raises:
            ArgosyError: a peer ended meanwhile; in all processes.
        """
        restored = self._restored
        assert restored is not None
        names = sorted(shards.needed_files(self.path(step), shardings, restored.files))
        fetched = processes.run_together("local shards fetched", lambda: restored.fetch(names))
        if from_others := sum(processes.all_gather("local bytes fetched", fetched)):
            self.warn(f"{from_others / 1e6:.1f} MB of local checkpoint {step} came from other hosts")
        restored.close()

    def dismiss(self) -> None:
        """The step that was agreed on is not read: another tier has a newer one."""
        if self._restored is not None:
            self._restored.close()
        shutil.rmtree(self.folder / RESTORED, ignore_errors=True)

    # ---------------------------------------------------------------- commit

    def is_saved(self, step: int) -> bool:
        return False

    def write(self, step: int, items: shards.Items, copies: HostCopies, meta: str) -> None:
        folder = self.folder / str(step)
        try:
            meta = processes.broadcast("local meta", lambda: meta)
            # Every process writes what describes the step too.
            files = [*shards.shard_files(items), *shards.description_files(items, meta)]
            processes.run_together("local clean", lambda: self._begin(folder))
            hashes = processes.run_together("local shards", lambda: step_files.write_files(folder, files, self._pace))
            every = processes.all_gather("local hashes", hashes)
            merged = processes.run_together("local equal", lambda: _merged(every))
            if self.copies > 1:
                self._copy(folder, every, merged)
            processes.run_together("local committed", lambda: manifest.commit(folder, dict(sorted(merged.items()))))
        except BaseException as failure:
            self._failure = failure
            shutil.rmtree(folder, ignore_errors=True)
            return
        copies.release()
        self.retire_or_say(step)

    def _begin(self, folder: Path) -> None:
        shutil.rmtree(self.folder / RESTORED, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def _copy(self, folder: Path, every: list[manifest.Files], files: manifest.Files) -> None:
        """Fetches what processes of other hosts wrote, so that each shard is on `copies` hosts."""
        offer = offer_files("local offer of copies", {name: folder / name for name in every[processes.rank()]})
        try:
            offers = processes.all_gather("local copies", offer.address)
            processes.run_together("local copied", lambda: self._fetch_copies(folder, every, files, offers))
        finally:
            offer.close()

    def _fetch_copies(self, folder: Path, every: list[manifest.Files], files: manifest.Files, offers: list[Any]) -> None:
        for source in copy_sources(self.places, processes.rank(), self.copies):
            for name in every[source]:
                if not (folder / name).exists():
                    peers.fetch(tuple(offers[source]), name, folder / name, files[name])

    # ---------------------------------------------------------------- retire

    def retire(self, newest: int) -> None:
        """Keeps the newest steps of this process; removes those of ranks that the run no longer has."""
        steps = self.own_steps()
        for step in set(steps) - set(steps[-KEEP:]) - {newest}:
            _remove(self.folder / str(step), self._pace)
        self._remove_higher_ranks()

    def clear(self) -> None:
        """Removes the steps of this process, and those of ranks that the run no longer has: a newer one is in the persistent tier."""
        self._remove_higher_ranks()
        shutil.rmtree(self.folder, ignore_errors=True)
        # Not empty while another process of the host has its own.
        with suppress(OSError):
            self.root.rmdir()

    def _remove_higher_ranks(self) -> None:
        """One process of each host does: a run with fewer processes than before never saves into the folders of the others."""
        ranks = [rank for rank, place in enumerate(self.places) if place == self.places[processes.rank()]]
        if processes.rank() == min(ranks):
            folders: list[Path] = []
            # Another process of the host may remove the root when it has removed its own.
            with suppress(FileNotFoundError):
                folders = list(self.root.iterdir())
            for folder in folders:
                if folder.name.isdecimal() and int(folder.name) >= processes.process_count():
                    shutil.rmtree(folder, ignore_errors=True)

    def drop_newer(self, step: int) -> None:
        """Removes the steps of this process after that one."""
        for folder in list(self.folder.iterdir()):
            if folder.name.isdecimal() and int(folder.name) > step:
                _remove(folder)
        processes.run_together("local dropped", lambda: None)


def copy_sources(places: list[str], rank: int, copies: int) -> list[int]:
    """The ranks whose shards a rank keeps too: those of the hosts before its own, which their processes share among them."""
    hosts = list(dict.fromkeys(places))
    mine = [other for other, place in enumerate(places) if place == places[rank]]
    at, sources = hosts.index(places[rank]), []
    for back in range(1, copies):
        theirs = [other for other, place in enumerate(places) if place == hosts[at - back]]
        sources += [other for i, other in enumerate(theirs) if i % len(mine) == mine.index(rank)]
    return sources


def _merged(every: list[manifest.Files]) -> manifest.Files:
    """All files of a step.

    Raises:
        ArgosyError: two processes wrote one file with other bytes: copies of a shard have come apart.
    """
    files: manifest.Files = {}
    for rank, rank_files in enumerate(every):
        for name, info in rank_files.items():
            if files.setdefault(name, info) != info:
                raise ArgosyError(f"process {rank} holds another copy of {name} than a process before it")
    return files


def _remove(step: Path, pace: SavePace | None = None) -> None:
    (step / manifest.NAME).unlink(missing_ok=True)
    if pace is not None:
        remove_files(step, pace)
    shutil.rmtree(step, ignore_errors=True)
