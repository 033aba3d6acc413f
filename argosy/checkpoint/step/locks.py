"""Locks by which a checkpoint that is being read is not removed."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.weights.manifest import NAME


class ReadLock:
    """A shared lock on a checkpoint while it is read; retention does not remove a locked one. Released with this object.

    On file systems without locks there is no protection, and a reader may have to start again.

    Raises:
        FileNotFoundError: the checkpoint is gone, or was removed while this waited for its lock.
    """

    def __init__(self, folder: Path):
        self._file: int | None = os.open(folder / NAME, os.O_RDONLY)
        try:
            # What removes a checkpoint holds its lock until the manifest is gone.
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
    """Locks a checkpoint against readers, to remove it. Gives whether the lock was free: False if a process reads the checkpoint.

    While the block runs no reader can begin, so the manifest is removed inside the block.
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
