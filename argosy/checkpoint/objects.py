"""Checkpoints where nothing can be renamed: object stores, reached through fsspec.

A step is written to a local scratch folder and copied file by file. Its manifest is copied last and removed first, so a step has
a manifest only while it is complete. The price is local space for one checkpoint. No other module knows of this.
"""

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import Damaged
from argosy.core.formats.files import File
from argosy.core.storage import Missing, Store
from argosy.weights import manifest

CHUNK_BYTES = 1 << 23


class Fetched:
    """Local copies of steps, made on first use and removed with this object."""

    def __init__(self, store: Store):
        self.store = store
        self._scratch: Path | None = None

    def path(self, name: str) -> Path:
        """The local copy of a step, fetched again if the step was written again since.

        Raises:
            BadInput: there is no such step.
        """
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="argosy-"))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        folder, pending = self._scratch / name, self._scratch / f"{name}.part"
        if not self._is_current(name, folder):
            for old in (folder, pending):
                shutil.rmtree(old, ignore_errors=True)
            for file in files_under(self.store, name):
                self.store.get_file(f"{name}/{file}", pending / file)
            # An interrupted download does not get this far.
            pending.rename(folder)
        return folder

    def _is_current(self, name: str, folder: Path) -> bool:
        """Whether the copy has the manifest that the step has now."""
        copy = folder / manifest.NAME
        with self.store.open(f"{name}/{manifest.NAME}") as file:
            return copy.is_file() and copy.read_bytes() == file.read()


def manifest_of(store: Store, name: str) -> dict[str, Any]:
    """`manifest.read` of a checkpoint in a store.

    Raises:
        Missing: there is no manifest. Damaged: it differs from what was written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store.get_file(f"{name}/{manifest.NAME}", Path(scratch, manifest.NAME))
        try:
            return manifest.read(Path(scratch))
        except Damaged as error:
            raise Damaged(error.what, where=f"{store.root}/{name}") from None


def passed(store: Store, name: str, expected: Mapping[str, Any], to: Path | None = None) -> None:
    """Reads a file of a store, and keeps it where `to` says.

    Raises:
        Damaged: it is not what the manifest says. OSError: it cannot be reached, or there is no room for it.
    """
    where, digest, size = f"{store.root}/{name}", hashlib.sha256(), 0
    own = name.partition("/")[2]
    if to is not None:
        to.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = store.open(name)
    except Missing:
        raise Damaged(f"{own} is missing", where=where) from None
    with opened as source, open(os.devnull if to is None else to, "wb") as kept:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            kept.write(chunk)
            size += len(chunk)
    if {"bytes": size, "sha256": digest.hexdigest()} != expected:
        raise Damaged(f"{own} differs from what was written: its size or its SHA-256 is another", where=where)


def copied(store: Store, folder: Path) -> Path:
    """The folder, with all files of the store in it."""
    for file in files_under(store, ""):
        store.get_file(file, folder / file)
    return folder


def files_under(store: Store, name: str) -> list[str]:
    """Every file under a directory, by its relative name."""
    files: list[str] = []
    for entry in store.list(name):
        inside = f"{name}/{entry}" if name else entry
        files += [f"{entry}/{file}" for file in files_under(store, inside)] if store.is_directory(inside) else [entry]
    return files


def upload(folder: Path, store: Store, name: str) -> None:
    """Copies a complete step. Its manifest is copied last, which commits it."""
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f.name != manifest.NAME)
    for file in (*files, manifest.NAME):
        store.put_file(f"{name}/{file}", folder / file)


def put(store: Store, name: str, files: Iterable[File], at_once: int) -> dict[str, dict[str, Any]]:
    """Writes files of a step, several at once, hashing them on their way; returns the size and hash of each, {file: ...}."""

    def one(file: File) -> dict[str, Any]:
        digest = hashlib.sha256()
        with store.open(f"{name}/{file.name}", "wb") as target:
            for slab in file.slabs(np.ascontiguousarray):
                digest.update(slab.data)
                target.write(slab.data)
        return {"bytes": file.bytes, "sha256": digest.hexdigest()}

    files = list(files)
    with ThreadPoolExecutor(at_once, "upload") as pool:
        return dict(zip([file.name for file in files], pool.map(one, files), strict=True))


def retire(store: Store, name: str) -> None:
    """Removes a step, its manifest first."""
    store.remove(f"{name}/{manifest.NAME}")
    store.remove(name)


def set_aside(store: Store, name: str) -> str:
    """Moves a damaged step to another name, which is returned. Its files are copied before anything is removed."""
    aside, n = f"{name}.damaged", 1
    # Without a manifest it is a copy that a kill cut off.
    while store.exists(f"{aside}/{manifest.NAME}"):
        n += 1
        aside = f"{name}.damaged-{n}"
    files = [file for file in files_under(store, name) if file != manifest.NAME]
    for file in (*files, manifest.NAME):
        store.copy(f"{name}/{file}", f"{aside}/{file}")
    retire(store, name)
    return aside


def sweep(store: Store) -> None:
    """Removes steps that a kill left without a manifest."""
    for name in store.list():
        if name.isdecimal() and not store.exists(f"{name}/{manifest.NAME}"):
            store.remove(name)
