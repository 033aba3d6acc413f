"""How fast a save is written while training needs every core: its share of a core is taken from the step's.

Where this process keeps all cores busy, the thread that writes to a disk rests six times as long as it works: on two cores a step
beside it takes a tenth longer, and not half, and the save is committed four times later (docs/log, 2026-11-25). Nothing rests once
training waits for the save: before the next one, or at its end. Each time that a save has to be waited for, later ones rest half
as long. Where a core is idle, as on most hosts of accelerators, nothing rests.
"""

import os
import threading
import time
from pathlib import Path

from argosy.core.process.cores import cores

# Seconds of rest for each of work.
REST = 6.0
# With less than this of a core idle, training and the save wait for each other.
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
        # Seconds of the clock, of the process on all cores, of the thread that writes.
        self._last: tuple[float, float, float] | None = None

    def hurry(self) -> None:
        """Somebody waits for the save."""
        self._awaited.set()

    def worked(self) -> bool:
        """Rests, unless somebody waits or a core was idle since the last call. Returns whether training needs every core, and nobody
        waits."""
        last, self._last = self._last, (time.perf_counter(), time.process_time(), time.thread_time())
        if last is None:
            return not self._awaited.is_set()
        wall, process, thread = (now - then for now, then in zip(self._last, last, strict=True))
        return process > (self._cores - SPARE) * wall and not self._awaited.wait(self._rest * thread)


def remove_files(folder: Path, pace: SavePace) -> None:
    """Removes all files of a folder, at this pace."""
    for parent, _, names in os.walk(folder):
        for name in names:
            Path(parent, name).unlink()
            pace.worked()
