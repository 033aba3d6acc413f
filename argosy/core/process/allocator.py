"""Lets glibc's malloc keep the memory that a training step frees. Works only on Linux with glibc, and does nothing elsewhere.

On a CPU, XLA allocates its temporaries anew in every run of a program. glibc returns freed blocks of more than 32 MB to the system, so
the kernel has to clear their pages again in the next step. This took 26 % of the CPU time of a step of GRPO (docs/log, 2026-11-24).
With the functions here, the process keeps the memory of its largest step until it ends.

    share_one_arena()     call before the process has a second thread: if a second arena exists, all threads use it in turn, and it
                          returns blocks of more than 64 MB regardless of these options
    keep_freed_memory()   call before the first step, if there is enough memory

The environment takes precedence: if $GLIBC_TUNABLES or a $MALLOC_ variable sets one of these options, both functions do nothing.
"""

import ctypes
import os
import sys

# malloc.h of glibc; `mallopt` takes ints.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
NAMES = ("trim_threshold", "top_pad", "mmap_max", "mmap_threshold", "arena_max")
# -1 is the largest size_t, so memory is never trimmed. With a smaller TOP_PAD, every small request would need a system call.
NEVER, TOP_PAD = -1, 64 * 2**20


def share_one_arena() -> bool:
    """Makes threads that start from now on allocate from the main arena. Returns whether the option could be set."""
    return _set((M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process from now on, for later requests. Returns whether the options could be set."""
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
    """The names of options that $MALLOC_ variables set, such as MALLOC_ARENA_MAX or MALLOC_TRIM_THRESHOLD_."""
    return {name.removeprefix("MALLOC_").rstrip("_").lower() for name in os.environ if name.startswith("MALLOC_")}
