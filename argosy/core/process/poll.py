"""Waiting for descriptors of any number: `select.select` fails beyond 1,023, which a run reaches that keeps many files open."""

import select
from collections.abc import Sequence


def ready_to_read(files: Sequence[int], timeout: float) -> list[int]:
    """The descriptors that can be read without waiting, after at most so many seconds. A closed pipe can be."""
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    return [file for file, _ in waiting.poll(max(0.0, timeout) * 1000)]
