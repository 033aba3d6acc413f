"""Writes a folder as `TARGET.part` beside the target, with a journal of its complete files, and renames it at the end.

The process may be killed at any instant. The next process keeps each file that is in the journal and matches its hash, and writes
everything else again. The target exists completely or not at all. An unfinished folder of another conversion is refused and never
removed. Files are hashed while another thread writes them, so the manifest of a checkpoint needs no second reading. This module knows
nothing of tensors: files come from `core.formats`.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import ArgosyError, BadInput, Busy
from argosy.core.formats.files import File, Order, check_space, sync
from argosy.weights import manifest
from argosy.weights.output import HashedOutput, JobQueue

JOURNAL = ".journal.jsonl"
# The errors of network file systems without locks. Other processes are not kept out there.
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}

Identity = Mapping[str, Any]


class StagedFolder:
    """A context manager that writes a folder by the calls `plan`, `write` and `commit`. Without `commit`, complete files are kept for
    the next process.

    Args:
        target: a folder that does not exist or is empty.
        identity: a JSON object that identifies the conversion: its source, its kind and its settings. An unfinished folder with the
            same identity is continued. With None nothing is kept or continued.
        progress: called with the number of bytes written since the last call.

    Raises:
        BadInput: the target exists, or the unfinished folder belongs to another conversion. The message names each difference.
        Busy: another process is writing the folder.
    """

    def __init__(self, target: Path, identity: Identity | None, progress: Callable[[int], None] = lambda _: None):
        self.target, self.identity, self.progress = target, identity, progress
        self.folder = target.with_name(target.name + ".part")
        # The size and hash of each complete file.
        self.done: dict[str, dict[str, Any]] = {}
        self._hasher, self._writer = JobQueue("hasher"), JobQueue("writer")
        # The files that are being written.
        self._outputs: set[HashedOutput] = set()
        self._lock: int | None = None
        # Whether this process may remove the folder.
        self._is_begun = False
        if is_occupied(target):
            raise BadInput(f"{target} is not empty", hint="name a new folder; nothing is ever overwritten")

    def plan(self, files: Sequence[File]) -> int:
        """Finds the files that are already complete and checks that there is space for the others, before anything is written.

        Returns:
            the number of bytes that are kept from an earlier process.

        Raises:
            BadInput: there is too little space.
        """
        listed = self._left_over()
        expected = {file.name: file.bytes for file in files}
        likely = {
            name: self.folder / name
            for name, digest in listed.items()
            if expected.get(name) == digest["bytes"] and (self.folder / name).is_file()
        }
        with ThreadPoolExecutor() as hashers:
            for name, digest in zip(likely, hashers.map(manifest.hash_file, likely.values())):
                if digest == listed[name]:
                    self.done[name] = digest
        kept_bytes = sum(digest["bytes"] for digest in self.done.values())
        check_space(self.target.parent, sum(expected.values()) - kept_bytes)
        self._begin()
        return kept_bytes

    def write(self, files: Iterable[File], order: Order = np.ascontiguousarray) -> None:
        """Writes the files that are not complete yet.

        Args:
            order: makes a slab contiguous in memory.

        Raises:
            ArgosyError: the system reports an error. Complete files are kept.
        """
        with _FileErrors(self.folder):
            for file in files:
                if file.name not in self.done:
                    self._write(file, order)
            self._writer.wait()

    def commit(self) -> None:
        """Renames the folder to its target once everything in it is on disk."""
        with _FileErrors(self.folder):
            inside = [path for path in self.folder.rglob("*") if path.name != JOURNAL]
            # All files are synced at the end, because syncing each small file when it is written costs 20 ms.
            for path in (*inside, self.folder):
                sync(path)
            # This also replaces an empty folder.
            self.folder.rename(self.target)
            (self.target / JOURNAL).unlink()
            sync(self.target)
            sync(self.target.absolute().parent)

    def __enter__(self) -> "StagedFolder":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._hasher.close()
        self._writer.close()
        for output in self._outputs:
            output.file.close()
        if kind is not None and self.identity is None and self._is_begun:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    # ---------------------------------------------------------------- what exists already

    def _left_over(self) -> dict[str, dict[str, Any]]:
        """Returns the size and hash of each file in the journal, if the unfinished folder belongs to this conversion."""
        if not self.folder.exists():
            return {}
        if not (self.folder / JOURNAL).is_file():
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                return {}
            raise BadInput(f"{self.folder} is in the way", hint="move it: the target is written under this name first")
        self._hold()
        identity, *lines = _journal(self.folder / JOURNAL) or [{}]
        if identity == {"facts": None} == {"facts": self.identity}:
            _clear(self.folder)
            return {}
        if identity == {"facts": self.identity}:
            return {line["file"]: {k: line[k] for k in ("bytes", "sha256")} for line in lines}
        theirs, ours = identity.get("facts") or {}, self.identity or {}
        differ = [
            f"{k} was {theirs.get(k)}, is {ours.get(k)}" for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)
        ]
        raise BadInput(
            f"{self.folder} is an unfinished folder of another conversion",
            where="; ".join(differ),
            hint="finish that conversion with the same command, remove the folder, or name another target",
        )

    def _begin(self) -> None:
        """Creates and locks the folder, and writes its journal with the files that are complete."""
        with _FileErrors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._hold()
            pending = self.folder / (JOURNAL + ".new")
            lines = [{"facts": self.identity}, *({"file": name} | digest for name, digest in self.done.items())]
            pending.write_text("".join(json.dumps(line) + "\n" for line in lines))
            pending.replace(self.folder / JOURNAL)
            self._is_begun = True

    def _hold(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another process is writing {self.folder}"
            raise Busy(problem, hint="wait for it, or name another target") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    # ---------------------------------------------------------------- writing

    def _write(self, file: File, order: Order) -> None:
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        output = HashedOutput(path)
        self._outputs.add(output)
        for slab in file.slabs(order):
            self._hasher.do(partial(output.digest.update, slab.data))
            self._writer.do(partial(output.add, slab))
            self.progress(len(slab))
        self._hasher.do(output.hashed.set)
        self._writer.do(partial(self._whole, file, output))

    def _whole(self, file: File, output: HashedOutput) -> None:
        digest = output.close()
        self._outputs.discard(output)
        if digest["bytes"] != file.bytes:
            raise ValueError(f"`{file.name}` has {digest['bytes']} bytes, announced as {file.bytes}")
        with (self.folder / JOURNAL).open("a") as journal:
            journal.write(json.dumps({"file": file.name} | digest) + "\n")
        self.done[file.name] = digest


class StagedFile(StagedFolder):
    """Writes a single file as `StagedFolder` writes a folder. The folder `TARGET.part` holds the file until it is complete."""

    def __init__(self, target: Path, identity: Identity | None, progress: Callable[[int], None] = lambda _: None):
        if target.exists() or target.is_symlink():
            _remove_rest(target.with_name(target.name + ".part"))
            raise BadInput(f"{target} exists", hint="name a new file; nothing is ever overwritten")
        super().__init__(target, identity, progress)

    def __exit__(self, kind: Any, *rest: object) -> None:
        super().__exit__(kind, *rest)
        # An incomplete file cannot be continued.
        if kind is not None and self._is_begun and not self.done:
            shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self) -> None:
        """Renames the file to its target once it is on disk."""
        with _FileErrors(self.folder):
            file = self.folder / self.target.name
            sync(file)
            file.rename(self.target)
            sync(self.target.absolute().parent)
            _remove_rest(self.folder)


def write_staged(
    target: Path, file: File, identity: Identity | None, order: Order, progress: Callable[[int, int, int], None]
) -> None:
    """Writes one file, completely or not at all. After the process was killed, the same call starts again.

    Args:
        identity: a JSON object that identifies the conversion, as in `StagedFolder`.
        order: makes a slab contiguous in memory.
        progress: called with (bytes written since the last call, bytes of the file, bytes kept from an earlier process).

    Raises:
        BadInput: the target exists, or the disk is too small.
    """
    with StagedFile(target, identity) as part:
        kept_bytes = part.plan([file])
        progress(0, file.bytes, kept_bytes)
        part.progress = lambda new: progress(new, file.bytes, kept_bytes)
        part.write([file], order)
        part.commit()


# ---------------------------------------------------------------- helpers


def _remove_rest(folder: Path) -> None:
    """Removes a folder that holds only a journal, because its file has been renamed to the target."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [JOURNAL]:
        shutil.rmtree(folder)


def is_occupied(target: Path) -> bool:
    """Returns whether the target exists and is not an empty folder. First removes the journal of a conversion that was killed between
    its rename and the removal of the journal."""
    if (target / JOURNAL).is_file():
        (target / JOURNAL).unlink()
    return target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))


def _journal(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a journal, up to a line that is incomplete because the process was killed."""
    lines = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _FileErrors:
    """Converts errors of the operating system about files to errors of this project."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
            hint = "complete files are kept: fix this, and the same command continues"
            raise ArgosyError(f"cannot write {self.folder}: {reason}", hint=hint) from error
