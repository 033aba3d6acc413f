"""Keeps steps in an object store, which is reached through fsspec and where nothing can be renamed.

Each process sends its own files, and fetches the files that it needs into a scratch folder, several at a time. Files are hashed while
they arrive.
"""

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.failures import root_of
from argosy.checkpoint.medium.medium import Medium, Wanted
from argosy.checkpoint.saving.pace import SavePace
from argosy.core.errors import ArgosyError, Damaged
from argosy.core.formats.files import File
from argosy.core.storage import Missing, Store
from argosy.weights import manifest

# The number of concurrent requests of this process. A small request mostly waits.
REQUESTS = 16
CHUNK_BYTES = 1 << 23


class ObjectStore(Medium):
    """An object store of steps. The files of a step are fetched before they are read."""

    def __init__(self, store: Store):
        super().__init__(store)
        self._scratch: Path | None = None

    def put(self, step: int, files: Iterable[File], pace: SavePace) -> manifest.Files:
        # Only the leader may write through the store of the run, but every process writes its own shards.
        store, files = Store(self.store.root), list(files)
        return dict(zip([file.name for file in files], _in_threads(lambda file: upload(store, str(step), file), files), strict=True))

    def commit(self, step: int, files: manifest.Files) -> None:
        self.store.write_text(f"{step}/{manifest.NAME}", manifest.manifest_text(files))

    def files(self, step: int) -> manifest.Files:
        return fetch_manifest(self.store, str(step))

    def verify(self, step: int, files: Mapping[str, Any], keep: bool) -> None:
        if keep:
            self.local(step, files.__contains__)
        else:
            _in_threads(lambda name: download(self.store, f"{step}/{name}", files[name]), files)

    def local(self, step: int, is_wanted: Wanted = lambda name: True) -> Path:
        folder, files = self._copy(step)
        missing = [name for name in files if is_wanted(name) and not (folder / name).exists()]
        # The largest files come first, so that no thread is left with a large file at the end.
        missing.sort(key=lambda name: -files[name]["bytes"])
        _in_threads(lambda name: download(self.store, f"{step}/{name}", files[name], folder / name), missing)
        return folder

    def release(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def retire(self, step: int, pace: SavePace) -> None:
        self.store.remove(f"{step}/{manifest.NAME}")
        self.store.remove(str(step))

    def set_aside(self, step: int) -> str:
        """Renames a damaged step, whose files are all copied before any is removed. Returns the new name."""
        aside, n = f"{step}.damaged", 1
        # A copy without a manifest is incomplete, because a process was killed.
        while self.store.exists(f"{aside}/{manifest.NAME}"):
            n += 1
            aside = f"{step}.damaged-{n}"
        files = [file for file in files_under(self.store, str(step)) if file != manifest.NAME]
        for file in (*files, manifest.NAME):
            self.store.copy(f"{step}/{file}", f"{aside}/{file}")
        self.store.remove(f"{step}/{manifest.NAME}")
        self.store.remove(str(step))
        return aside

    def _copy(self, step: int) -> tuple[Path, manifest.Files]:
        """Returns the scratch folder and the manifest of a step. The folder is emptied if the step was written again since."""
        current, where = _manifest(self.store, str(step))
        files = manifest.parse_manifest(current, where)
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="argosy-"))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        folder = self._scratch / str(step)
        copy = folder / manifest.NAME
        if not copy.is_file() or copy.read_bytes() != current:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            copy.write_bytes(current)
        return folder, files


def upload(store: Store, folder: str, file: File) -> dict[str, Any]:
    """Writes a file into a directory of a store and returns its size and hash."""
    digest = hashlib.sha256()
    with store.open(f"{folder}/{file.name}", "wb") as target:
        for slab in file.slabs(np.ascontiguousarray):
            digest.update(slab.data)
            target.write(slab.data)
    return {"bytes": file.bytes, "sha256": digest.hexdigest()}


def download(store: Store, name: str, expected: Mapping[str, Any], to: Path | None = None) -> None:
    """Reads and hashes a file of a store.

    Args:
        name: the path of the file in the store.
        expected: the size and hash of the file in the manifest.
        to: the path to which the file is written, completely or not at all. None keeps nothing.

    Raises:
        Damaged: the file is missing, or differs from what the manifest says.
        ArgosyError: the file cannot be reached.
        OSError: the disk has no space for the file.
    """
    where, file, digest, size = f"{store.root}/{name}", name.partition("/")[2], hashlib.sha256(), 0
    pending = Path(os.devnull) if to is None else to.with_name(f"{to.name}.part")
    if to is not None:
        to.parent.mkdir(parents=True, exist_ok=True)
    try:
        source = store.open(name)
    except Missing:
        raise Damaged(f"{file} is missing", where=where) from None
    with source, pending.open("wb") as target:
        while chunk := _read(source, where, CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            size += len(chunk)
    if {"bytes": size, "sha256": digest.hexdigest()} != expected:
        raise Damaged(f"{file} differs from what was written: its size or its SHA-256 is another", where=where)
    if to is not None:
        pending.rename(to)


def _read(source: Any, where: str, size: int = -1) -> bytes:
    try:
        return source.read(size)
    # Clients of object stores have classes of their own.
    except Exception as error:
        raise ArgosyError(f"it cannot be read: {root_of(error)}", where=where) from error


def fetch_manifest(store: Store, folder: str) -> manifest.Files:
    """Reads the manifest of a step in a store: the size and hash of each file.

    Raises:
        Missing: there is no manifest.
        Damaged: the manifest differs from what was written.
    """
    return manifest.parse_manifest(*_manifest(store, folder))


def _manifest(store: Store, folder: str) -> tuple[bytes, str]:
    """Returns the bytes of a manifest, and the address of its step."""
    where = f"{store.root}/{folder}"
    with store.open(f"{folder}/{manifest.NAME}") as file:
        return _read(file, where), where


def copy_tree(store: Store, folder: Path) -> Path:
    """Copies all files of a store into a folder. Returns the folder."""
    for file in files_under(store, ""):
        store.get_file(file, folder / file)
    return folder


def files_under(store: Store, name: str) -> list[str]:
    """Returns the relative path of every file under a directory of a store."""
    files: list[str] = []
    for entry in store.list(name):
        inside = f"{name}/{entry}" if name else entry
        files += [f"{entry}/{file}" for file in files_under(store, inside)] if store.is_directory(inside) else [entry]
    return files


def _in_threads(do: Callable[[Any], Any], names: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(REQUESTS, "object store") as pool:
        return list(pool.map(do, names))
