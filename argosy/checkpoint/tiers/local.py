"""Checkpoints on the fast disks of the hosts. Each process keeps its own shards. A step is usable as long as the hosts together have
all of its files.

    <checkpoint.local>/<run>/<rank>/<step>/     a manifest of all files of the step, and the files that this process has

Every process writes every shard that its devices hold, including replicas, so with data parallelism each host has all files. With
`local_copies=2` a process also keeps the shards of a process on another host. If a host lost its disk, processes that need a file fetch
it from a process that has it (`tiers.restore`). Each process reads only the shards that its devices hold.

A step is committed by its manifest, which each process writes after all have written their files. If a step was made again, its two
manifests count as two steps, whose files are never mixed.
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
        root: the folder of the run on this host.
        copies: the least number of hosts that keep each shard.
        place: a name that identifies this host and its disk among the others.
        belongs: (step, its metadata) -> whether the step belongs to the current history of the run, and was not undone by a rollback.
        memory: the host memory for the copies of a save.
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
        """Returns the steps that this host has files of, oldest first."""
        return sorted({step for step, _ in self._local_steps()})

    def own_steps(self) -> list[int]:
        """Returns the steps of this process, oldest first. Folders of other processes on the host are not looked at, because they may
        vanish at any time when a run ends."""
        return sorted(int(folder.name) for folder in self.folder.iterdir() if folder.name.isdecimal()) if self.folder.is_dir() else []

    def latest_good(self) -> int | None:
        """Finds the newest step whose files are all found undamaged on some host. Newer steps are incomplete and are removed."""
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
        """Returns the steps on this host with their folders. The folders of this process come first."""
        others = (folder for folder in sorted(self.root.iterdir()) if folder != self.folder and folder.is_dir())
        return steps_on_host([self.folder, *others], self.belongs)

    # ---------------------------------------------------------------- read

    def path(self, step: int) -> Path:
        """Returns the folder of the step that `latest_good` found. It holds the shards that this process needs after `prepare`."""
        assert self._restored is not None
        assert self._restored.step == step
        return self._restored.folder

    def meta(self, step: int) -> dict[str, Any]:
        return read_meta(self.path(step))

    def prepare(self, step: int, shardings: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetches the shards that the devices of this process need and this host lacks.

        Args:
            step: the step that `latest_good` found.
            shardings: the sharding of each array, {item: {name: sharding}}.

        Raises:
            ArgosyError: a peer ended in the meantime. Raised in all processes.
        """
        restored = self._restored
        assert restored is not None
        names = sorted(shards.needed_files(self.path(step), shardings, restored.files))
        fetched = processes.run_together("local shards fetched", lambda: restored.fetch(names))
        if from_others := sum(processes.all_gather("local bytes fetched", fetched)):
            self.warn(f"{from_others / 1e6:.1f} MB of local checkpoint {step} came from other hosts")
        restored.close()

    def dismiss(self) -> None:
        """Drops the step that `latest_good` found, because another tier has a newer one."""
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
            # Every process also writes the files that describe the step.
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
        """Fetches files that processes on other hosts wrote, so that each shard is on `copies` hosts."""
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
        """Removes all but the newest steps of this process, and the steps of ranks that the run no longer has."""
        steps = self.own_steps()
        for step in set(steps) - set(steps[-KEEP:]) - {newest}:
            _remove(self.folder / str(step), self._pace)
        self._remove_higher_ranks()

    def clear(self) -> None:
        """Removes the steps of this process and of ranks that the run no longer has, because the persistent tier has a newer one."""
        self._remove_higher_ranks()
        shutil.rmtree(self.folder, ignore_errors=True)
        # The folder is not empty while another process on the host has its own steps.
        with suppress(OSError):
            self.root.rmdir()

    def _remove_higher_ranks(self) -> None:
        """Removes the folders of ranks that the run no longer has. One process of each host does so, because a run with fewer processes
        than before never saves into these folders again."""
        ranks = [rank for rank, place in enumerate(self.places) if place == self.places[processes.rank()]]
        if processes.rank() == min(ranks):
            folders: list[Path] = []
            # Another process on the host may remove the root after its own folder.
            with suppress(FileNotFoundError):
                folders = list(self.root.iterdir())
            for folder in folders:
                if folder.name.isdecimal() and int(folder.name) >= processes.process_count():
                    shutil.rmtree(folder, ignore_errors=True)

    def drop_newer(self, step: int) -> None:
        """Removes the steps of this process that are newer than `step`."""
        for folder in list(self.folder.iterdir()):
            if folder.name.isdecimal() and int(folder.name) > step:
                _remove(folder)
        processes.run_together("local dropped", lambda: None)


def copy_sources(places: list[str], rank: int, copies: int) -> list[int]:
    """Returns the ranks whose shards a rank keeps beside its own. They are on the `copies` - 1 hosts before its own. The processes of a
    host divide the ranks of each of these hosts among them.

    Args:
        places: the host of each rank.
        rank: the rank.
        copies: the number of hosts that keep each shard.
    """
    hosts = list(dict.fromkeys(places))
    mine = [other for other, place in enumerate(places) if place == places[rank]]
    at, sources = hosts.index(places[rank]), []
    for back in range(1, copies):
        theirs = [other for other, place in enumerate(places) if place == hosts[at - back]]
        sources += [other for i, other in enumerate(theirs) if i % len(mine) == mine.index(rank)]
    return sources


def _merged(every: list[manifest.Files]) -> manifest.Files:
    """Merges the files of all processes to all files of a step.

    Raises:
        ArgosyError: two processes wrote a file with different bytes, because replicas of a shard differ.
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
