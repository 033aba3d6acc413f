"""Reads and writes the files of a run, in a local directory or at any URL that fsspec knows (`gs://`, `s3://`, `memory://`).

A file is written completely or not at all. An incomplete last line, left by a killed process, does not affect lines that are appended
later. One process at a time holds a run, by a lock that ends with the process (`Store.lock`). This module does not know what the files
mean.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal
from uuid import uuid4

from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.locks import LOCK, KernelLock, Lease, Lock

COPY_BYTES = 1 << 23
# Object stores cannot append to files, so a file of lines is rewritten. This is the least number of seconds between two rewrites.
REWRITE_S = 10.0

# The errors of network file systems without flock.
_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class Missing(BadInput):
    """Raised if there is no such file."""


class Store:
    """The files under a root directory or URL. Names are relative, with `/`. Directories are created with the files in them."""

    def __init__(self, root: str | Path):
        self.root = str(root)
        self.is_local = "://" not in self.root
        if self.is_local:
            self.root = str(Path(root).expanduser())
        else:
            self._files, self._base = file_system(self.root)
        self._lines: dict[str, _Lines] = {}

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    def child(self, name: str) -> "Store":
        """A store for the directory `name` under this one."""
        return Store(self.root + "/" * (not self.root.endswith("/")) + _check_relative(name))

    def local_path(self, name: str = "") -> Path:
        """The path of a file on this machine.

        Raises:
            BadInput: the store is remote.
        """
        if not self.is_local:
            raise BadInput(f"`{self.root}` is not a directory on this machine", hint="give a local path")
        return self._path(name) if name else Path(self.root)

    def read_text(self, name: str) -> str:
        """Reads a UTF-8 file.

        Raises:
            BadInput: no such file.
            Damaged: the file is not UTF-8.
        """
        with self.open(name) as file, _our_errors(self, name):
            data = file.read()
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"`{name}` is not UTF-8 at byte {error.start}", where=f"in {self.root}") from None

    def write_text(self, name: str, text: str) -> None:
        """Writes a file as UTF-8, completely or not at all. On return, a local file is safely on disk."""
        self.write_bytes(name, text.encode("utf-8"))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a file completely or not at all, like `write_text`."""
        self._lines.pop(name, None)
        with _our_errors(self, name):
            if self.is_local:
                _write_atomically(self._path(name), data)
            else:
                self._files.pipe_file(self._address(name), data)

    def append_line(self, name: str, line: str) -> None:
        """Appends a line. In a local store, the operating system has the line on return. In a remote store, it is buffered for up to
        `REWRITE_S` seconds, or until `flush`. If writing the buffer fails, an error is raised, the lines stay in the buffer, and the
        next attempt is made after `REWRITE_S`."""
        with _our_errors(self, name):
            if self.is_local:
                _append(self._path(name), line)
            else:
                self._lines.setdefault(name, _Lines()).new.append(line)
                self._put_lines(name, REWRITE_S)

    def flush(self, name: str | None = None) -> None:
        """Writes the buffered lines of one file, or of all files."""
        for file in self._lines if name is None else (name,):
            self._flush(file)

    def _flush(self, name: str) -> None:
        if name in self._lines:
            with _our_errors(self, name):
                self._put_lines(name, 0.0)

    def buffered(self, name: str) -> int:
        """The number of buffered lines of a file."""
        return len(self._lines[name].new) if name in self._lines else 0

    def exists(self, name: str) -> bool:
        with _our_errors(self, name):
            return self._path(name).exists() if self.is_local else self._files.exists(self._address(name))

    def list(self, name: str = "") -> list[str]:
        """The names in a directory, sorted, without hidden files; empty if there is no such directory."""
        with _our_errors(self, name):
            if self.is_local:
                folder = self.local_path(name)
                names = os.listdir(folder) if folder.is_dir() else []
            else:
                address = self._address(name) if name else self._base
                paths = self._files.ls(address, detail=False) if self._files.isdir(address) else []
                names = [path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != address]
        return sorted(name for name in names if not name.startswith("."))

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with its contents. Does nothing if it does not exist."""
        self._lines.pop(name, None)
        with _our_errors(self, name):
            if not self.is_local:
                if self._files.exists(self._address(name)):
                    self._files.rm(self._address(name), recursive=True)
                return
            path = self._path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        self._flush(name)
        with _our_errors(self, name):
            return self._path(name).stat().st_size if self.is_local else self._files.size(self._address(name))

    def written_s(self, name: str) -> float | None:
        """The time when a file was last written, in seconds since 1970; None if the store does not tell it."""
        with _our_errors(self, name):
            if self.is_local:
                return self._path(name).stat().st_mtime
            try:
                return self._files.modified(self._address(name)).timestamp()
            except NotImplementedError:
                return None

    def open(self, name: str, mode: Literal["rb", "wb"] = "rb") -> IO[bytes]:
        """Opens a file of bytes. Writing is not atomic. If that matters, write under another name first."""
        self._flush(name)
        with _our_errors(self, name):
            if not self.is_local:
                return self._files.open(self._address(name), mode)
            path = self._path(name)
            if mode == "wb":
                path.parent.mkdir(parents=True, exist_ok=True)
            return path.open(mode)

    def put_file(self, name: str, path: Path) -> None:
        """Copies a local file into the store."""
        with path.open("rb") as source, self.open(name, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)

    def get_file(self, name: str, path: Path) -> None:
        """Copies a file from the store to a local path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as source, path.open("wb") as target, _our_errors(self, name):
            shutil.copyfileobj(source, target, COPY_BYTES)

    def copy(self, name: str, to: str) -> None:
        """Copies a file within the store. Object stores do this without sending the file to this machine."""
        self._flush(name)
        with _our_errors(self, name):
            if self.is_local:
                self._path(to).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._path(name), self._path(to))
            else:
                self._files.cp_file(self._address(name), self._address(to))

    def is_directory(self, name: str) -> bool:
        with _our_errors(self, name):
            return self._path(name).is_dir() if self.is_local else self._files.isdir(self._address(name))

    def lock(self) -> Lock:
        """Gives this process exclusive access to the directory.

        In a local store, the kernel holds the lock, and releases it when the process ends in any way. In a remote store, and on file
        systems without such locks, the lock is a lease that is renewed every 15 seconds. A lease is weaker: clocks may differ, a
        process that stalls for `LEASE_S` seconds loses it, and a killed process keeps it for that time.

        Raises:
            Busy: another process holds the directory. The message names the process and its host.
        """
        if self.is_local:
            with _our_errors(self, LOCK):
                try:
                    return KernelLock(self._path(LOCK))
                except OSError as error:
                    if error.errno not in _NO_FLOCK:
                        raise
        # The lease gets its own store, because it uses it in another thread.
        return Lease(Store(self.root))

    def _path(self, name: str) -> Path:
        return Path(self.root, _check_relative(name))

    def _address(self, name: str) -> str:
        return f"{self._base}/{_check_relative(name)}"

    def _get(self, name: str) -> bytes:
        try:
            return self._files.cat_file(self._address(name))
        except FileNotFoundError:
            return b""

    def _put_lines(self, name: str, every_s: float) -> None:
        lines = self._lines[name]
        if lines.new and time.monotonic() - lines.put_at >= every_s:
            lines.put_at = time.monotonic()
            if lines.old is None:
                old = self._get(name)
                lines.old = bytearray(old + b"\n" if old and not old.endswith(b"\n") else old)
            new = "".join(f"{line}\n" for line in lines.new).encode("utf-8")
            self._files.pipe_file(self._address(name), bytes(lines.old) + new)
            lines.old += new
            lines.new.clear()


class ReadOnly(Store):
    """The files of a run for processes that must not write them. All writes are ignored, because another process of the run writes."""

    def child(self, name: str) -> "ReadOnly":
        return ReadOnly(super().child(name).root)

    def write_text(self, name: str, text: str) -> None: ...

    def append_line(self, name: str, line: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def put_file(self, name: str, path: Path) -> None: ...

    def copy(self, name: str, to: str) -> None: ...

    def lock(self) -> Lock:
        return nullcontext()  # pyright: ignore[reportReturnType]


def file_system(root: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the URL without its scheme.

    Raises:
        BadInput: the scheme is unknown, or needs a package that is not installed.
    """
    # Imported here, because it takes 0.1 s, which local runs do not need.
    import fsspec

    # For other schemes, directories are only parts of names.
    options = {"auto_mkdir": True} if root.startswith(("file://", "local://")) else {}
    try:
        files, base = fsspec.url_to_fs(root, use_listings_cache=False, **options)
    except ImportError as error:
        raise BadInput(f"`{root}` needs a package that is not installed: {error}") from None
    except ValueError as error:
        raise BadInput(f"`{root}`: {str(error).splitlines()[0]}") from None
    return files, base.rstrip("/")


def _check_relative(name: str) -> str:
    """Returns a relative name, after a check that it stays under the root."""
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        raise BadInput(f"{name!r} is not a valid name for a file of a run")
    return "/".join(parts)


@contextmanager
def _our_errors(store: Store, name: str) -> Iterator[None]:
    """A context manager that converts errors of the operating system, and of the client of an object store, to an ArgosyError."""
    try:
        yield
    except ArgosyError:
        raise
    except FileNotFoundError:
        raise Missing(f"no file `{name}`", where=f"in {store.root}") from None
    except PermissionError:
        raise BadInput(f"no permission for `{name}`", where=f"in {store.root}") from None
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space; what was written before is intact" if full else None
        raise ArgosyError(f"`{name}`: {problem}", where=f"in {store.root}", hint=hint) from error
    except Exception as error:
        if store.is_local:
            raise
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ArgosyError(f"`{name}`: {problem}", where=f"in {store.root}") from error


# ---- bytes on this machine


def _write_atomically(path: Path, data: bytes) -> None:
    """Writes a file under another name, syncs it, renames it, and syncs the directory. A reader sees the old or the new file, and never
    a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = path.with_name(f".{path.name}.{os.getpid()}.{uuid4().hex[:8]}.tmp")
    try:
        with pending.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        pending.replace(path)
    finally:
        pending.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _append(path: Path, line: str) -> None:
    """Appends a line in one write call, so that lines of two threads do not mix. If the last line is incomplete after a kill, a newline
    ends it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
        data = b"\n" * torn + line.encode("utf-8") + b"\n"
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


class _Lines:
    """The buffer of a file of lines in an object store, which cannot append to files.

    old: the content of the file in the store; None until it is read.
    new: the lines that are not written yet.
    put_at: the time of the last attempt to write, as in `time.monotonic`.
    """

    def __init__(self):
        self.old: bytearray | None = None
        self.new: list[str] = []
        self.put_at = float("-inf")
