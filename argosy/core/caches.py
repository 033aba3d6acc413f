"""Where Argosy keeps what it can make again, and a lock for those who make it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.core.progress import Say


def cache_home() -> Path | None:
    """`argosy` under $XDG_CACHE_HOME, or under ~/.cache; None if this user has no home directory."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "argosy"
    try:
        return Path.home() / ".cache" / "argosy"
    except RuntimeError:
        return None


@contextmanager
def file_lock(lock: Path, say: Say) -> Iterator[None]:
    """Held by one process at a time, by a lock on this file that ends with the process. Says so if it must wait."""
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
    """The size to which the cache of compiled programs is reduced: $ARGOSY_CACHE_GB in 1e9 bytes, or 20."""
    try:
        return int(float(os.environ.get("ARGOSY_CACHE_GB", "")) * 1e9)
    except ValueError:
        return 20_000_000_000


def bound_cache(folder: Path, most: int, every_s: float = 86_400.0) -> int:
    """Removes the files of a folder that were not used for longest until the rest has at most so many bytes. Returns the bytes removed.

    Args:
        every_s: looks only if nobody has for so many seconds: a listing of thousands of files takes a while.
    """
    stamp = folder / ".bounded"
    try:
        if not folder.is_dir() or (stamp.exists() and time.time() - stamp.stat().st_mtime < every_s):
            return 0
        stamp.touch()
        about = [(path, path.stat()) for path in folder.iterdir() if path.is_file() and path != stamp]
    except OSError:
        # A cache that cannot be looked at costs nothing else.
        return 0
    remaining, removed = sum(stat.st_size for _, stat in about), 0
    # Whichever is later: file systems may not write the time of reading.
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
    """Removes the files of a folder, and returns how many and their bytes. A program that runs keeps what it has read."""
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
