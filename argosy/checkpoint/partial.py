"""A folder in the making: `TARGET.part` beside the target, a journal of what is whole in it, one rename at the end.

Notable: a process may be killed at any instant. What the journal names and its hash confirms is kept by the next one,
everything else is written again, and the target is there whole or not at all. A left-over of another conversion is refused
and never removed. Hashes are taken on the way, while another thread writes, so the manifest of a checkpoint costs no second
reading. Knows nothing of tensors: files come from `core.formats`.
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

from argosy.checkpoint import manifest
from argosy.checkpoint.output import Output, Pipe
from argosy.core.errors import ArgosyError, BadInput, Busy
from argosy.core.formats.files import File, Order, check_space, sync

JOURNAL = ".journal.jsonl"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}  # some network file systems: nobody is kept out

Facts = Mapping[str, Any]


class Partial:
    """A context manager: `plan`, `write`, `commit`. Left without `commit`, what is whole is kept for the next process.

    Args:
        target: a folder that is not there, or empty.
        facts: what is being written, from what, and how: JSON. A left-over with the same facts is gone on with; None: it
            cannot be gone on with, and nothing is left over.
        told: called with bytes, as they are written.

    Raises:
        BadInput: the target is there; the left-over is of another conversion, each difference named.
        Busy: another process is writing it.
    """

    def __init__(self, target: Path, facts: Facts | None, told: Callable[[int], None] = lambda _: None):
        self.target, self.facts, self.told = target, facts, told
        self.folder = target.with_name(target.name + ".part")
        self.done: dict[str, dict[str, Any]] = {}  # of each whole file: bytes and sha256
        self._hasher, self._writer = Pipe("hasher"), Pipe("writer")
        self._outputs: set[Output] = set()  # under way
        self._lock: int | None = None
        if taken(target):
            raise BadInput(f"{target} is not empty", hint="name a new folder; nothing is ever overwritten")

    def plan(self, files: Sequence[File]) -> int:
        """Looks at what is there already, and at the space for the rest, before anything is written. Returns the bytes that
        are kept.

        Raises:
            BadInput: too little space.
        """
        listed = self._left_over()
        expected = {file.name: file.bytes for file in files}
        likely = {
            name: self.folder / name
            for name, found in listed.items()
            if expected.get(name) == found["bytes"] and (self.folder / name).is_file()
        }
        with ThreadPoolExecutor() as hashers:
            for name, found in zip(likely, hashers.map(manifest.describe, likely.values())):
                if found == listed[name]:
                    self.done[name] = found
        kept = sum(found["bytes"] for found in self.done.values())
        check_space(self.target.parent, sum(expected.values()) - kept)
        self._begin()
        return kept

    def write(self, files: Iterable[File], order: Order = np.ascontiguousarray) -> None:
        """Writes those that are not there yet.

        Raises:
            ArgosyError: the system refuses; what is whole is kept.
        """
        with _refused(self.folder):
            for file in files:
                if file.name not in self.done:
                    self._write(file, order)
            self._writer.wait()

    def commit(self) -> None:
        """Gives the folder its name, when everything in it is on disk."""
        with _refused(self.folder):
            inside = [path for path in self.folder.rglob("*") if path.name != JOURNAL]
            for path in (*inside, self.folder):  # all at the end: one by one, small files cost 20 ms each
                sync(path)
            self.folder.rename(self.target)  # over an empty folder, too
            (self.target / JOURNAL).unlink()
            sync(self.target)
            sync(self.target.absolute().parent)

    def __enter__(self) -> "Partial":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._hasher.close()
        self._writer.close()
        for output in self._outputs:
            output.file.close()
        if kind is not None and self.facts is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    # ---------------------------------------------------------------- what is there

    def _left_over(self) -> dict[str, dict[str, Any]]:
        """The journal's files, if it is of this conversion."""
        if not self.folder.exists():
            return {}
        if not (self.folder / JOURNAL).is_file():
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                return {}
            raise BadInput(f"{self.folder} is in the way", hint="move it: the target is written under this name first")
        self._hold()
        facts, *lines = _journal(self.folder / JOURNAL) or [{}]
        if facts == {"facts": None} == {"facts": self.facts}:
            _clear(self.folder)
            return {}
        if facts == {"facts": self.facts}:
            return {line["file"]: {k: line[k] for k in ("bytes", "sha256")} for line in lines}
        theirs, ours = facts.get("facts") or {}, self.facts or {}
        differ = [
            f"{k} was {theirs.get(k)}, is {ours.get(k)}" for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)
        ]
        raise BadInput(
            f"{self.folder} is left over from another conversion",
            where="; ".join(differ),
            hint="finish that one with its own words, remove the folder, or name another target",
        )

    def _begin(self) -> None:
        """The folder, held, with a journal of what was found good."""
        with _refused(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._hold()
            pending = self.folder / (JOURNAL + ".new")
            lines = [{"facts": self.facts}, *({"file": name} | found for name, found in self.done.items())]
            pending.write_text("".join(json.dumps(line) + "\n" for line in lines))
            pending.replace(self.folder / JOURNAL)

    def _hold(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another process is writing {self.folder}"
            raise Busy(what, hint="wait for it, or name another target") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    # ---------------------------------------------------------------- writing

    def _write(self, file: File, order: Order) -> None:
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        output = Output(path)
        self._outputs.add(output)
        for slab in file.slabs(order):
            self._hasher.do(partial(output.digest.update, slab.data))
            self._writer.do(partial(output.add, slab))
            self.told(len(slab))
        self._hasher.do(output.hashed.set)
        self._writer.do(partial(self._whole, file, output))

    def _whole(self, file: File, output: Output) -> None:
        found = output.close()
        self._outputs.discard(output)
        if found["bytes"] != file.bytes:
            raise ValueError(f"`{file.name}` has {found['bytes']} bytes, announced were {file.bytes}")
        with (self.folder / JOURNAL).open("a") as journal:
            journal.write(json.dumps({"file": file.name} | found) + "\n")
        self.done[file.name] = found


# ---------------------------------------------------------------- small things


def taken(target: Path) -> bool:
    """Whether something stands where a folder is to be written. A conversion that was killed after its rename, before its
    journal was gone, is finished here."""
    if (target / JOURNAL).is_file():
        (target / JOURNAL).unlink()
    return target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))


def _journal(path: Path) -> list[dict[str, Any]]:
    """Its lines; one that a kill tore ends them."""
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


class _refused:
    """What the system says of files, as an error of ours."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            what = (error.strerror or str(error)).lower()
            hint = "what is whole is kept: mend it, and the same command goes on"
            raise ArgosyError(f"cannot write {self.folder}: {what}", hint=hint) from error
