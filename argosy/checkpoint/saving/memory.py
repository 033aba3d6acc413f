"""Copies a state into host memory that is kept from one save to the next.

Training stands still while a save copies the state. 480 MB are copied in 0.04 s into memory that the process already has, and in 0.1 to
0.5 s into new memory, whose pages the system clears first (docs/log, 2026-11-25). A save needs memory for a second copy of the state
either way. This module keeps that memory until the run ends, if the machine has enough. Arrays of the host, such as the position in the
data, may change their size between saves, so they are copied to new memory.

    memory = HostMemory()
    memory.reserve(sizes)            before the first save, in a thread
    copies = memory.copies()         for each save
    copies.of(array)                 in several threads
    copies.release()                 once the copies are written
    memory.free()                    when no other save follows
"""

import math
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from argosy.observe.environment import memory_bytes

# Memory is kept for copies of at least this many bytes. For smaller ones, malloc reuses memory by itself.
LEAST = 1 << 20


class HostMemory:
    """Host memory for copies, which is kept between saves. Several tiers may share it."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()
        self._reserving = True

    def copies(self) -> "HostCopies":
        # If a save comes before `reserve` is done, the save takes the missing memory itself and keeps it.
        self._reserving = False
        return HostCopies(self)

    def reserve(self, sizes: Counter[int]) -> threading.Thread:
        """Allocates memory for the first save in a thread, as long as the machine keeps as much memory free. `sizes`: {bytes of an
        array: number of such arrays}."""
        thread = threading.Thread(target=self._reserve, args=(sizes,), name="checkpoint memory", daemon=True)
        # Without a thread, only the first save is slower.
        with suppress(RuntimeError):
            thread.start()
        return thread

    def _reserve(self, sizes: Counter[int]) -> None:
        whole = sum(size * count for size, count in sizes.items())
        for size in (n for n in sizes.elements() if n >= LEAST):
            # Checked for each array, because other processes of the machine reserve memory at the same time.
            if not self._reserving or not _has_room(size + whole):
                return
            try:
                block = np.empty(size, np.uint8)
            except MemoryError:
                return
            # The system gives a page when it is first written.
            block.fill(0)
            self.give([block])

    def take(self, size: int) -> np.ndarray:
        with self._lock:
            if free := self._free.get(size):
                return free.pop()
        return np.empty(size, np.uint8)

    def give(self, blocks: list[np.ndarray]) -> None:
        """Keeps blocks that are no longer in use, unless the machine has less free memory than their size."""
        if _has_room(sum(block.nbytes for block in blocks)):
            with self._lock:
                for block in blocks:
                    self._free.setdefault(block.nbytes, []).append(block)

    def free(self) -> None:
        """Frees unused blocks."""
        self._reserving = False
        with self._lock:
            self._free.clear()


class HostCopies:
    """The copies of one save. If the save fails and never releases them, they are freed with this object."""

    def __init__(self, memory: HostMemory):
        self._memory = memory
        self._blocks: list[np.ndarray] = []

    def of(self, array: Any) -> np.ndarray:
        """Copies an array of the host, or an array on a device of this process."""
        values = np.asarray(array)
        if not isinstance(array, jax.Array):
            return np.array(values)
        copy = self._empty(values.shape, values.dtype)
        np.copyto(copy, values)
        return copy

    def joined(self, shape: tuple[int, ...], dtype: np.dtype, parts: list[tuple[Any, Any]]) -> np.ndarray:
        """Copies an array that is split over several devices of this process. `parts`: (index in the array, values) of each part."""
        if len(parts) == 1:
            return self.of(parts[0][1])
        copy = self._empty(shape, dtype)
        for index, values in parts:
            copy[index] = np.asarray(values)
        return copy

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST:
            return np.empty(shape, dtype)
        block = self._memory.take(size)
        self._blocks.append(block)
        return block.view(dtype).reshape(shape)

    def release(self) -> None:
        """Returns the memory of the copies for the next save. Nothing may read the copies afterwards."""
        blocks, self._blocks = self._blocks, []
        self._memory.give(blocks)


def _has_room(size: int) -> bool:
    free = memory_bytes()[1]
    return free is None or free >= size
