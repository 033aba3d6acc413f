"""Lets glibc's malloc keep the memory that a training step frees. On Linux with glibc only; elsewhere nothing happens.

XLA on a CPU allocates its temporaries anew in every run of a program. glibc gives blocks of more than 32 MB back to the system when
they are freed, so the kernel clears every page of them again in the next step: 26 % of the CPU time of a step of GRPO
(docs/log, 2026-11-24). Kept, the process holds its largest step's memory until it ends.

    share_one_arena()     before the process has a second thread: another arena, once there, is used by all threads in turn, and
                          gives blocks of more than 64 MB back whatever is set
    keep_freed_memory()   before the first step, where there is memory for it

The environment comes first: where $GLIBC_TUNABLES or a $MALLOC_ variable sets one of these options, both do nothing.
"""

import ctypes
import os
import sys

# malloc.h of glibc; `mallopt` takes ints.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
NAMES = ("trim_threshold", "top_pad", "mmap_max", "mmap_threshold", "arena_max")
# -1 is the largest size_t: never. Growing by less than this would be a system call for every small request.
NEVER, TOP_PAD = -1, 64 * 2**20


def share_one_arena() -> bool:
    """Makes threads that start from now on allocate from the main arena. Returns whether it does."""
    return _set((M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process from now on, for later requests. Returns whether it does."""
    return _set((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD))


def _set(*options: tuple[int, int]) -> bool:
    if any(f"glibc.malloc.{name}" in os.environ.get("GLIBC_TUNABLES", "") or name in _variables() for name in NAMES):
        return False
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    # musl has no mallopt.
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        return False
    done = [libc.mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in options]
    return all(done)


def _variables() -> set[str]:
    """Options that $MALLOC_ variables set, such as MALLOC_ARENA_MAX or MALLOC_TRIM_THRESHOLD_."""
    return {name.removeprefix("MALLOC_").rstrip("_").lower() for name in os.environ if name.startswith("MALLOC_")}
