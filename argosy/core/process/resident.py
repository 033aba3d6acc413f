"""Returns unused memory of the process to the system. Works only on Linux, and does nothing elsewhere."""

import ctypes
import functools
import mmap
import sys
from typing import Any

DONT_NEED = 4


def drop(address: int, length: int) -> None:
    """Drops the memory pages that lie completely in a range. The next access finds zeros, or the bytes of the file in a mapped file. So
    nothing is lost if the range holds only zeros or is a read-only map.

    Args:
        address: the first byte of the range.
        length: the length of the range in bytes.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and (libc := _libc()) is not None:
        # If the kernel refuses, for instance for locked pages, they stay as they are.
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONT_NEED)


def trim() -> None:
    """Returns the memory that malloc keeps for later requests: 80 to 120 MB after weights are loaded and programs are compiled."""
    if (libc := _libc()) is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
