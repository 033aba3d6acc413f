"""Gives memory back to the system that the process holds and does not use. On Linux only; elsewhere nothing happens."""

import ctypes
import functools
import mmap
import sys
from typing import Any

DONT_NEED = 4


def drop(address: int, length: int) -> None:
    """Drops the pages of memory that lie entirely in a range. The next access finds what is behind them: zeros in the process's own
    memory, the file's bytes in a mapped file. So it loses nothing where memory holds zeros or is a read-only map.

    Args:
        address, length: in bytes.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and (libc := _libc()) is not None:
        # A refusal, such as of locked pages, leaves them as they are.
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONT_NEED)


def trim() -> None:
    """Returns what malloc keeps for later requests. After weights are loaded and programs compiled, this is 80 to 120 MB."""
    if (libc := _libc()) is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
