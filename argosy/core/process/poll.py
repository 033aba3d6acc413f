"""Waits for file descriptors. `select.select` fails for descriptors above 1,023, which a run with many open files reaches."""

import select
from collections.abc import Sequence


def ready_to_read(files: Sequence[int], timeout: float) -> list[int]:
    """Waits at most `timeout` seconds, and returns the descriptors that can be read without blocking, including closed pipes."""
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    return [file for file, _ in waiting.poll(max(0.0, timeout) * 1000)]
