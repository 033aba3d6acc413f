"""Locks that keep a checkpoint from being removed while it is read."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.weights.manifest import NAME


class ReadLock:
    """A shared lock on a checkpoint, which retention does not remove while it is locked. The lock ends with this object.

    On file systems without locks there is no protection, and a reader may have to start again.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or was removed while this process waited for the lock.
    """

    def __init__(self, folder: Path):
        self._file: int | None = os.open(folder / NAME, os.O_RDONLY)
        try:
            # A process that removes a checkpoint holds the exclusive lock until the manifest is removed.
            fcntl.flock(self._file, fcntl.LOCK_SH)
        except OSError:
            self.release()
            return
        try:
            is_same = os.path.sameopenfile(self._file, now := os.open(folder / NAME, os.O_RDONLY))
            os.close(now)
        except OSError:
            self.release()
            raise
        if not is_same:
            self.release()
            raise FileNotFoundError(errno.ENOENT, "it was replaced while its lock was awaited", str(folder / NAME))

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.release()


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Locks a checkpoint against readers, so that it can be removed. Yields True if the lock was free, and False if a process reads the
    checkpoint.

    No reader can begin inside the block, so the manifest must be removed there.
    """
    file = os.open(folder / NAME, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error.errno not in (errno.EAGAIN, errno.EACCES)
        else:
            yield True
    finally:
        os.close(file)
