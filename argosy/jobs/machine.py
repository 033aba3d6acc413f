"""Prepares the environment of the process before jax is imported. Called by verbs that compute, never on import.

Huge pages: XLA:CPU allocates its temporary buffer with malloc at each step and frees it, so every step touches it anew in 4 kB
pages (420,000 minor faults a step at 31M parameters). glibc reads the tunable for huge pages only at exec, so the process
replaces itself once, which costs 10 ms and saves 10 to 18 % of a step. $ARGOSY_HUGE_PAGES=0 turns this off.
"""

import os
import platform
import sys
from pathlib import Path

from argosy.core.caches import bound_cache, cache_home, most_bytes
from argosy.core.counts import plural
from argosy.core.process import signals
from argosy.core.process.cores import core_count

TUNABLE = "glibc.malloc.hugetlb=1"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CACHE_HINT = "set XDG_CACHE_HOME to a writable folder"


def prepare() -> None:
    """Sets the environment variables that XLA and malloc read at start. Replaces the process once if huge pages are available."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _wide_vectors()
    if signals.is_command() and wants_huge_pages():
        tunables = [os.environ.get("GLIBC_TUNABLES", ""), TUNABLE]
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, tunables))
        signals.hold()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def wants_huge_pages() -> bool:
    """Whether the system has huge pages, nobody turned them off, and this process was not started with them."""
    if "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "") or os.environ.get("ARGOSY_HUGE_PAGES") == "0":
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    return HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text()


def _wide_vectors() -> None:
    """Asks XLA for 512-bit vectors if the processor has them; its default is 256."""
    flags = os.environ.get("XLA_FLAGS", "")
    cpu = Path("/proc/cpuinfo")
    if "prefer_vector_width" in flags or not cpu.exists() or "avx512f" not in cpu.read_text():
        return
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_prefer_vector_width=512".strip()


def cache_folder(name: str = "xla") -> Path | None:
    """Returns the folder of compiled programs, which processes share; None if this user has no home directory."""
    home = cache_home()
    return None if home is None else home / name


def programs_folder() -> Path | None:
    """Returns the folder of a server's programs (`ops.programs.store`), beside that of JAX's compilation cache."""
    return cache_folder("programs")


def start_jax() -> None:
    """Imports jax and turns on its persistent compilation cache: a second run of the same program starts without compiling. Once a
    day the programs that were not used for longest are removed, down to $ARGOSY_CACHE_GB.

    A folder that is set already, by JAX_COMPILATION_CACHE_DIR or in jax.config, stays, and so do its limits.
    """
    import jax

    folder = cache_folder()
    if folder is None or jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    bound_cache(folder, most_bytes())
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def machine_summary() -> str:
    """Describes Python, jax, the system, cores and devices in one line."""
    import jax

    devices = jax.devices()
    device = "cpu" if devices[0].platform == "cpu" else f"{len(devices)} x {devices[0].device_kind}"
    system = f"{platform.system()} {platform.machine()}"
    return f"Python {platform.python_version()}, jax {jax.__version__}, {system}, {plural(core_count(), 'core')}, {device}"
