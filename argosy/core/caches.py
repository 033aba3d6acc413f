"""The folder of Argosy's caches, a limit on their size, and a lock between processes that write to them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.core.progress import Say


def cache_home() -> Path | None:
    """The folder of caches: `argosy` under $XDG_CACHE_HOME, or else under ~/.cache; None if this user has no home directory."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "argosy"
    try:
        return Path.home() / ".cache" / "argosy"
    except RuntimeError:
        return None


@contextmanager
def file_lock(lock: Path, say: Say) -> Iterator[None]:
    """A context manager that one process at a time can enter. It locks a file, and the lock ends with the process. `say` is called if
    it has to wait."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that writes in {lock.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def most_bytes() -> int:
    """The limit of the cache of compiled programs, in bytes: $ARGOSY_CACHE_GB in units of 1e9 bytes, or else 20e9."""
    try:
        return int(float(os.environ.get("ARGOSY_CACHE_GB", "")) * 1e9)
    except ValueError:
        return 20_000_000_000


def bound_cache(folder: Path, most: int, every_s: float = 86_400.0) -> int:
    """Removes the least recently used files of a folder until the rest has at most `most` bytes. Returns the number of removed bytes.

    Args:
        every_s: does nothing if the folder was checked in the last `every_s` seconds, because listing thousands of files takes a while.
    """
    stamp = folder / ".bounded"
    try:
        if not folder.is_dir() or (stamp.exists() and time.time() - stamp.stat().st_mtime < every_s):
            return 0
        stamp.touch()
        about = [(path, path.stat()) for path in folder.iterdir() if path.is_file() and path != stamp]
    except OSError:
        # A cache that cannot be listed is no reason to fail.
        return 0
    remaining, removed = sum(stat.st_size for _, stat in about), 0
    # The later of both times counts, because some file systems do not store the time of access.
    for path, stat in sorted(about, key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime)):
        if remaining <= most:
            break
        try:
            path.unlink()
        except OSError:
            continue
        remaining, removed = remaining - stat.st_size, removed + stat.st_size
    return removed


def clear_cache(folder: Path) -> tuple[int, int]:
    """Removes all files of a folder. Returns the number of removed files, and their size in bytes. A running program keeps what it has
    read."""
    count = removed = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        try:
            if path.is_file():
                size = path.stat().st_size
                path.unlink()
                count, removed = count + 1, removed + size
        except OSError:
            continue
    return count, removed
