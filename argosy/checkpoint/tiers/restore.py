"""Restores a local step whose files lie on several hosts. Each process reads the files on its own host and fetches others from peers.

First, all processes exchange which files they have undamaged, a bit for each file. A step is restored if each of its files is on some
host. The files that describe the step are fetched at once. Shards are fetched when it is known which ones the devices of a process
need.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.step.layout import is_description
from argosy.checkpoint.step.load import read_meta
from argosy.checkpoint.tiers import peers
from argosy.core.errors import ArgosyError
from argosy.parallel import processes
from argosy.weights import manifest

# (step, digest of its manifest). A step that was made again has another key.
StepKey = tuple[int, str]


@dataclass(frozen=True)
class RestoredStep:
    """The step to resume from.

    step: the number of the step.
    folder: the folder of this host that it is read from.
    files: the size and hash of each file, from its manifest.
    holders: the ranks that have each file.
    addresses: the address of each rank's offer.
    offer: the offer of this process; None if every process has all files.
    """

    step: int
    folder: Path
    files: manifest.Files
    holders: Mapping[str, list[int]]
    addresses: list[Any]
    offer: peers.Offer | None

    def fetch(self, names: Iterable[str]) -> int:
        """Fetches those of the named files that are not in the folder. Returns the number of bytes."""
        fetched = 0
        for name in names:
            if (self.folder / name).exists() or name not in self.files:
                continue
            # Processes ask different holders.
            holders = self.holders[name]
            source = holders[processes.rank() % len(holders)]
            peers.fetch(tuple(self.addresses[source]), name, self.folder / name, self.files[name])
            fetched += self.files[name]["bytes"]
        return fetched

    def close(self) -> None:
        """Ends the offer."""
        if self.offer is not None:
            self.offer.close()


def steps_on_host(folders: Iterable[Path], belongs: Callable[[int, Mapping[str, Any]], bool]) -> dict[StepKey, list[Path]]:
    """Finds the steps on this host. Returns the folders that have files of each step.

    Args:
        folders: one folder for each process that has run on this host.
        belongs: (step, its metadata) -> whether the step belongs to the current history of the run, and was not undone by a rollback.
    """
    steps: dict[StepKey, list[Path]] = {}
    for folder in (step for parent in folders for step in parent.iterdir() if step.name.isdecimal()):
        try:
            files = manifest.read_manifest(folder)
        except ArgosyError:
            # The process was killed while writing, or the files are damaged. Other processes may have the step.
            continue
        # If the metadata cannot be read, the comparison with the manifest finds that.
        with suppress(ArgosyError):
            if not belongs(int(folder.name), read_meta(folder)):
                continue
        steps.setdefault((int(folder.name), manifest.manifest_digest(files)), []).append(folder)
    return steps


def restore_step(key: StepKey, folders: list[Path], home: Path, scratch: Path, warn: Callable[[str], None]) -> RestoredStep | None:
    """Restores a step up to the files that describe it. Returns None, in all processes, if files of the step are lost or cannot be
    fetched.

    Args:
        key: the step and the digest of its manifest.
        folders: the folders of this host that have files of the step.
        home: the folder in which this process saved the step.
        scratch: the folder in which the files are collected, unless `home` has all of them.
        warn: called with a sentence about files that are lost.
    """
    step, digest = key
    files = manifest.read_manifest(folders[0]) if folders else {}
    paths = _good_files(folders, files)
    bits = sum(1 << i for i, name in enumerate(sorted(files)) if name in paths)
    every = processes.all_gather("local files", [len(files), f"{bits:x}"])
    count, masks = max(n for n, _ in every), [int(mask, 16) for _, mask in every]
    if lost := count - sum(1 for i in range(count) if any(mask >> i & 1 for mask in masks)):
        warn(f"local checkpoint {step} lacks {lost} of its {count} files on all hosts, or they are damaged; it is not used")
        return None
    offer, addresses = None, []
    if any(mask != (1 << count) - 1 for mask in masks):
        offer, addresses = _offer_step(folders, paths)
        reached = all(peers.is_there(tuple(address)) for address in addresses)
        if not all(processes.all_gather("local offers reached", reached)):
            warn(f"local checkpoint {step} is not used: some processes cannot reach others to fetch its files")
            offer.close()
            return None
    is_home = bool(files) and all(paths.get(name) == home / name for name in files)
    folder = home if is_home else scratch
    source = next(rank for rank, mask in enumerate(masks) if mask)

    def gather() -> manifest.Files:
        shutil.rmtree(scratch.parent, ignore_errors=True)
        if not is_home:
            _link_files(paths, folder)
        if files:
            return files
        peers.fetch(tuple(addresses[source]), manifest.NAME, folder / manifest.NAME)
        fetched = manifest.read_manifest(folder)
        if manifest.manifest_digest(fetched) != digest:
            raise ArgosyError(f"the manifest of local checkpoint {step} did not arrive as it was written")
        return fetched

    files = processes.run_together("local begin", gather)
    names = sorted(files)
    holders = {name: [rank for rank, mask in enumerate(masks) if mask >> i & 1] for i, name in enumerate(names)}
    restored = RestoredStep(step, folder, files, holders, addresses, offer)
    processes.run_together("local metadata", lambda: restored.fetch(filter(is_description, names)))
    return restored


def _good_files(folders: list[Path], files: manifest.Files) -> dict[str, Path]:
    """Returns the path of each file of a step on this host. Damaged files are left out."""
    paths = dict[str, Path]()
    for folder in folders:
        present = {name: files[name] for name in files if name not in paths and (folder / name).exists()}
        paths |= {name: folder / name for name, fault in manifest.compare_files(folder, present).items() if fault is None}
    return paths


def _offer_step(folders: list[Path], paths: Mapping[str, Path]) -> tuple[peers.Offer, list[Any]]:
    manifest_files = {manifest.NAME: folders[0] / manifest.NAME} if folders else {}
    offer = offer_files("local offer", {**paths, **manifest_files})
    return offer, processes.all_gather("local offers", offer.address)


def _link_files(paths: Mapping[str, Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, path in paths.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, folder / name)
        except OSError:
            # Not every file system has hard links.
            shutil.copyfile(path, folder / name)


def offer_files(name: str, files: Mapping[str, Path]) -> peers.Offer:
    """Starts an offer of files in every process, or in none if one fails. Returns the offer of this process."""
    offers: list[peers.Offer] = []
    try:
        processes.run_together(name, lambda: offers.append(peers.Offer(processes.process_address(), files)))
    except BaseException:
        for offer in offers:
            offer.close()
        raise
    return offers[0]
