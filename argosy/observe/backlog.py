"""A file of lines that outlives a full disk, and an object store that is away: lines that cannot be written wait in memory, and come in
their order once it can be.

A run writes a few hundred bytes a step beside its checkpoints. A disk that is full for an hour, or a directory that became read-only,
costs no run that would go on training; what waits is lost only if the process ends before. On an object store, `Store` itself keeps the
lines that wait, since it writes the whole file every few seconds; `flush` writes it now.
"""

import threading
from collections import deque
from collections.abc import Callable

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.storage import Store


class Backlog:
    """Appends lines to a file.

    Args:
        say: called with a sentence when lines begin to wait, and when they are written.
    """

    def __init__(self, store: Store, file: str, say: Callable[[str], None]):
        self.store, self.file, self.say = store, file, say
        self._left: deque[str] = deque()
        self._away = False
        self._lock = threading.RLock()

    def append(self, line: str) -> None:
        if not self.store.is_local:
            self._elsewhere(lambda: self.store.append_line(self.file, line))
            return
        with self._lock:
            waiting = len(self._left)
            self._left.append(line)
            self._try(waiting)

    def flush(self) -> None:
        """Writes what waits, if that is possible."""
        if not self.store.is_local:
            self._elsewhere(lambda: self.store.flush(self.file))
            return
        with self._lock:
            self._try(len(self._left))

    def _try(self, waiting: int) -> None:
        """Writes what waits. waiting: lines that did before; then it was said, and not with each line."""
        try:
            self._put()
        except ArgosyError as error:
            if not waiting:
                self.say(f"{self.file} cannot be written: {error.what}; the run goes on, and its lines wait in memory")
            return
        if waiting:
            self.say(f"{self.file} can be written again; {plural(waiting, 'line', 'was', 'were')} waiting")

    def _elsewhere(self, write: Callable[[], None]) -> None:
        with self._lock:
            try:
                write()
            except ArgosyError as error:
                if not self._away:
                    self.say(f"{self.file} cannot be written: {error.what}; the run goes on, and its lines wait in memory")
                self._away = True
                return
            if self._away and not self.store.buffered(self.file):
                self._away = False
                self.say(f"{self.file} can be written again")

    def close(self) -> None:
        """Writes what waits, or says how much of it is lost."""
        if not self.store.is_local:
            self.flush()
            if line_count := self.store.buffered(self.file):
                self.say(f"the last {plural(line_count, 'line')} of {self.file} could not be written")
            return
        with self._lock:
            try:
                self._put()
            except ArgosyError as error:
                line_count = len(self._left)
                self._left.clear()
                self.say(f"{plural(line_count, 'line')} of {self.file} could not be written, and are lost: {error.what}")

    def _put(self) -> None:
        while self._left:
            self.store.append_line(self.file, self._left[0])
            self._left.popleft()
