"""Writes to text streams whose reader may be gone: a pipe to `head`, or a terminal after a dropped connection.

A command whose result is on disk must not fail because nobody reads what it prints.
"""

import errno
import os
from collections.abc import Callable
from typing import Any, TextIO

# EPIPE: a pipe without a reader. EIO: a terminal that hung up.
GONE = (errno.EPIPE, errno.EIO)


class Unfailing:
    """A text stream that ignores its first OSError and writes nothing after it."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.is_lost = False

    def write(self, text: str) -> int:
        return self._try(lambda: self.stream.write(text)) or 0

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Callable[[], Any]) -> Any:
        if not self.is_lost:
            try:
                return do()
            except OSError:
                self.is_lost = True
                silence(self.stream)
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def is_gone(error: OSError) -> bool:
    """Whether the error means that nobody reads the stream any more."""
    return error.errno in GONE


def silence(stream: TextIO) -> None:
    """Sends the rest of a stream's buffer, and all later output, to the null device. Otherwise Python's flush of the standard streams
    at exit would fail, and change the exit code to 120."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        # A stream in memory has no descriptor.
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
