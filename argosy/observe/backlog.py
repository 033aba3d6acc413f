"""Appends lines to a file. While the disk is full or the object store cannot be reached, lines wait in memory, and are written in order
afterwards.

A run writes a few hundred bytes per step beside its checkpoints. A disk that is full for an hour, or a directory that became read-only,
does not end a run that could go on training. Waiting lines are lost only if the process ends before they can be written. For an object
store, `Store` itself keeps the waiting lines, because it writes the whole file every few seconds. `flush` writes them at once.
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
        store, file: the store, and the name of the file in it.
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
        """Writes the waiting lines, if that is possible."""
        if not self.store.is_local:
            self._elsewhere(lambda: self.store.flush(self.file))
            return
        with self._lock:
            self._try(len(self._left))

    def _try(self, waiting: int) -> None:
        """Tries to write the waiting lines. `waiting`: the number of lines that waited before; if there were any, `say` was called
        already and is not called again."""
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
        """Writes the waiting lines, or says how many are lost."""
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
