"""Log files of processes."""

import sys
from contextlib import suppress
from pathlib import Path


class LogFile:
    """A log file that is appended to. If it cannot be written, that is reported once on stderr. It never raises, because the reader of
    a process's pipe must go on, or the process would block when it prints.
    """

    def __init__(self, path: Path):
        self.path, self._said = path, False
        self.write(b"")

    def write(self, data: bytes) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            if not self._said:
                self._said = True
                show(f"{self.path}: {(error.strerror or str(error)).lower()}; lines are missing there\n".encode())


def show(data: bytes) -> None:
    """Prints bytes on stderr, if there is one."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        # A notebook's has no bytes below it.
        if (stream := getattr(sys.stderr, "buffer", None)) is not None:
            stream.write(data)
        else:
            sys.stderr.write(data.decode("utf-8", "replace"))
        sys.stderr.flush()
