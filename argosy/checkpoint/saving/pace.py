"""Limits the speed of a save while training needs every core, because the writing thread takes its time from the steps.

If this process keeps all cores busy, the thread that writes to disk rests six times as long as it works. On two cores, steps during a
save then take a tenth longer instead of half, and the save takes four times as long (docs/log, 2026-11-25). The thread does not rest
once training waits for the save, before the next save or at the end. After each save that training had to wait for, later saves rest
half as long. If a core is idle, as on most hosts of accelerators, the thread does not rest.
"""

import os
import threading
import time
from pathlib import Path

from argosy.core.process.cores import cores

# Seconds of rest for each second of work.
REST = 6.0
# If less than this share of one core is idle, training and the save compete for cores.
SPARE = 0.5


class SavePace:
    """Limits the speed of one save. The writing thread calls `worked` every few milliseconds of its work.

    Args:
        rest: seconds of rest for each second of work.
    """

    def __init__(self, rest: float = REST) -> None:
        self._rest = rest
        self._awaited = threading.Event()
        self._cores = cores()
        # At the last call: seconds of the clock, CPU seconds of the process, CPU seconds of the writing thread.
        self._last: tuple[float, float, float] | None = None

    def hurry(self) -> None:
        """Ends all rests, because training waits for the save."""
        self._awaited.set()

    def worked(self) -> bool:
        """Rests, unless training waits for the save or a core was idle since the last call. Returns whether training needs every core
        and does not wait."""
        last, self._last = self._last, (time.perf_counter(), time.process_time(), time.thread_time())
        if last is None:
            return not self._awaited.is_set()
        wall, process, thread = (now - then for now, then in zip(self._last, last, strict=True))
        return process > (self._cores - SPARE) * wall and not self._awaited.wait(self._rest * thread)


def remove_files(folder: Path, pace: SavePace) -> None:
    """Removes all files of a folder at the pace of a save. The folders stay."""
    for parent, _, names in os.walk(folder):
        for name in names:
            Path(parent, name).unlink()
            pace.worked()
