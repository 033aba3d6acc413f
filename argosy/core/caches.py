"""Where Argosy keeps what it can make again, and a lock for those who make it."""

import os
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
def one_at_a_time(lock: Path, say: Say) -> Iterator[None]:
    """Held by one process at a time, by a lock on this file that ends with the process. Says so if it must wait."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that writes in {lock.parent}")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
