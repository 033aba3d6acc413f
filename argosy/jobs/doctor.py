"""`argosy doctor`: the devices, memory and packages of this machine, and problems with them.

Each finding is broken (nothing will run), a warning (wrong, slow, or likely to fail) or a note, with a hint. Checks are functions
from collected information to findings, so each can be tested on a machine without the problem.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.caches import clear_cache, most_bytes
from argosy.core.command import install_extra, install_package
from argosy.jobs import machine
from argosy.observe import environment
from argosy.observe.readable import format_bytes, format_duration
from argosy.ops.native import library

BROKEN, WARNING, NOTE = "broken", "warning", "note"
GIB = 1 << 30
TRUE = ("1", "true", "yes", "on", "y", "t")


@dataclass(frozen=True)
class Finding:
    """Something that a user may want to change about this machine.

    level: broken, warning or note.
    problem: what is wrong.
    hint: how to fix it.
    """

    level: str
    problem: str
    hint: str


def examine(devices: Callable[[], dict[str, Any]] = environment.device_facts) -> dict[str, Any]:
    """Collects the facts about this machine and the `findings`. `ok` in the result is false if something is broken."""
    folder = machine.cache_folder()
    place = folder or Path(tempfile.gettempdir())
    facts: dict[str, Any] = {
        "versions": environment.versions(),
        "machine": environment.machine(),
        "jax": devices(),
        "gpus": environment.gpu_names(),
        "disk": {"here": _disk(Path.cwd()), "cache": _disk(place), "temporary": _disk(Path(tempfile.gettempdir()))},
        "cache": {
            "folder": str(folder or "nowhere"),
            **_contents(place if folder else None),
            "most_bytes": most_bytes(),
            "writable": folder is not None and can_write(folder),
        },
        "huge_pages": huge_pages(),
        "kernels": kernels(),
        "open_files": _open_files(),
        "clock_behind_s": _clock_behind_s(),
        "variables": environment.environment_variables(),
    }
    findings = [finding for check in CHECKS for finding in check(facts)]
    order = (BROKEN, WARNING, NOTE)
    facts["findings"] = [vars(f) for f in sorted(findings, key=lambda f: order.index(f.level))]
    return facts | {"ok": all(f.level != BROKEN for f in findings)}


def clear_programs() -> dict[str, int]:
    """Removes the compiled programs of runs and servers. Returns their number and their bytes."""
    counts = [clear_cache(folder) for folder in (machine.cache_folder(), machine.programs_folder()) if folder is not None]
    return {"programs": sum(count for count, _ in counts), "bytes": sum(removed for _, removed in counts)}


# ---------------------------------------------------------------- checks


def check_packages(facts: Mapping[str, Any]) -> list[Finding]:
    absent = [name for name, v in facts["versions"].items() if v == "not installed" and name != "argosy"]
    hint = f"install argosy again: {install_package('.', '-e ')} in its checkout"
    return [Finding(BROKEN, f"not installed: {', '.join(absent)}", hint)] if absent else []


def check_devices(facts: Mapping[str, Any]) -> list[Finding]:
    answer, variables = facts["jax"], facts["variables"]
    platforms = variables.get("JAX_PLATFORMS")
    if error := answer.get("error"):
        hint = "try again without XLA_FLAGS and JAX_* variables" if variables else "install jax again"
        if "flag" in error.lower() and "XLA_FLAGS" in variables:
            hint = f"XLA_FLAGS={variables['XLA_FLAGS']} has a flag that this jaxlib does not know: unset it"
        elif platforms:
            hint = f"JAX_PLATFORMS={platforms} names a platform that is not available: unset it, or JAX_PLATFORMS=cpu"
        return [Finding(BROKEN, f"jax has no device: {error}", hint)]
    if answer["backend"] != "cpu":
        return []
    if facts["gpus"] and "cpu" in (platforms or ""):
        return [Finding(NOTE, f"{len(facts['gpus'])} GPUs, unused: JAX_PLATFORMS={platforms}", "unset JAX_PLATFORMS")]
    if facts["gpus"]:
        hint = f"in a checkout `./run --gpu VERB` makes an environment with CUDA; by hand: {install_extra('gpu')}"
        if not variables.get("CUDA_VISIBLE_DEVICES", "all").strip("-1 "):
            hint = "CUDA_VISIBLE_DEVICES hides them: unset it"
        return [Finding(WARNING, f"{len(facts['gpus'])} GPUs ({facts['gpus'][0]}), but jax only sees the CPU", hint)]
    if Path("/dev/accel0").exists():
        hint = f"in a checkout `./run --tpu VERB` makes an environment with libtpu; by hand: {install_extra('tpu')}"
        return [Finding(WARNING, "there is a TPU, but jax only sees the CPU", hint)]
    return []


def check_variables(facts: Mapping[str, Any]) -> list[Finding]:
    variables = facts["variables"]
    wrong = {
        "JAX_DISABLE_JIT": "nothing is compiled: a hundred times slower",
        "JAX_DEBUG_NANS": "every operation is checked for NaN: several times slower",
        "JAX_ENABLE_X64": "64-bit numbers where 32 were meant: slower, other results",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "compiled without optimizations",
        "JAX_LOG_COMPILES": "every compilation is logged",
    }
    on = [name for name in wrong if variables.get(name, "").lower() in TRUE]
    out = [Finding(WARNING, f"{name}={variables[name]}: {wrong[name]}", f"unset {name}") for name in on]
    if "xla_force_host_platform_device_count" in variables.get("XLA_FLAGS", ""):
        problem = "XLA_FLAGS splits the CPU into several devices, which share its cores"
        out.append(Finding(NOTE, problem, "good for tests of sharding; unset XLA_FLAGS for speed"))
    if variables.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        problem = "XLA_PYTHON_CLIENT_ALLOCATOR=platform: every buffer is allocated anew, which is slow"
        out.append(Finding(WARNING, problem, "unset XLA_PYTHON_CLIENT_ALLOCATOR"))
    return out


def _check_disk(facts: Mapping[str, Any]) -> list[Finding]:
    out = []
    for place, about in facts["disk"].items():
        free = about["free_bytes"]
        if free is not None and free < 2 * GIB:
            level = BROKEN if free < GIB // 8 and place == "here" else WARNING
            hint = "a run's checkpoints need three times the size of its model: free some space"
            out.append(Finding(level, f"{format_bytes(free)} free at {about['path']}", hint))
    if not can_write(Path.cwd()):
        hint = "runs are written to runs/ here: give dir=, or change to another directory"
        out.append(Finding(WARNING, f"no permission to write in {Path.cwd()}", hint))
    return out


def check_cache(facts: Mapping[str, Any]) -> list[Finding]:
    cache = facts["cache"]
    if not cache["writable"]:
        hint = f"fix the permissions of the home directory, or {machine.CACHE_HINT}"
        return [Finding(WARNING, f"compiled programs cannot be kept in {cache['folder']}", hint)]
    if cache["bytes"] > 10 * GIB:
        problem = f"{format_bytes(cache['bytes'])} of compiled programs are cached"
        return [Finding(NOTE, problem, f"`argosy doctor --clear-cache` removes them: {cache['folder']}")]
    return []


def check_machine(facts: Mapping[str, Any]) -> list[Finding]:
    about, out = facts["machine"], []
    if about["memory_free_bytes"] is not None and about["memory_free_bytes"] < GIB:
        problem = f"{format_bytes(about['memory_free_bytes'])} of memory free"
        out.append(Finding(WARNING, problem, "end other programs: the system kills a process that runs out of memory"))
    if about["load"] is not None and about["load"] > 1.5 * about["cores"]:
        problem = f"load {about['load']:g} on {about['cores']:g} core{'s' * (about['cores'] != 1)}: other programs are computing too"
        out.append(Finding(NOTE, problem, "times and tokens/s will be worse than this machine can do"))
    if facts["open_files"] is not None and facts["open_files"] < 1024:
        problem = f"{facts['open_files']} open files allowed"
        out.append(Finding(WARNING, problem, "ulimit -n 4096, or checkpoints may fail"))
    if facts["clock_behind_s"] > 86400:
        problem = f"the clock is {format_duration(facts['clock_behind_s'])} behind this program's own files"
        out.append(Finding(WARNING, problem, "set the clock: the newest run is found by it, and certificates are checked by it"))
    return out


def check_huge_pages(facts: Mapping[str, Any]) -> list[Finding]:
    state = facts["huge_pages"]["state"]
    if facts["jax"].get("backend", "cpu") != "cpu" or state == "asked for":
        return []
    hints = {
        "off in the system": "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        "off by ARGOSY_HUGE_PAGES": "unset ARGOSY_HUGE_PAGES",
        "off by GLIBC_TUNABLES": f"add {machine.TUNABLE} to GLIBC_TUNABLES",
    }
    problem = f"huge pages are {state}: a training step on the CPU takes 10 to 18 % longer"
    return [Finding(NOTE, problem, hints[state])] if state in hints else []


def check_kernels(facts: Mapping[str, Any]) -> list[Finding]:
    if not (why := facts["kernels"]["why_not"]) or facts["jax"].get("backend", "cpu") != "cpu":
        return []
    problem = f"no compiled kernels: {why}; on this CPU, answering several requests takes up to twice as long"
    hint = f"unset {library.SWITCH}" if library.SWITCH in why else "they need a C++17 compiler, such as the package g++; $CXX names one"
    return [Finding(NOTE, problem, hint)]


CHECKS: tuple[Callable[[Mapping[str, Any]], list[Finding]], ...] = (
    check_packages, check_devices, check_variables, _check_disk, check_cache, check_machine, check_huge_pages, check_kernels
)  # fmt: skip


# ---------------------------------------------------------------- collecting


def huge_pages() -> dict[str, str]:
    """Returns what the system allows, and whether commands that compute request huge pages."""
    if platform.libc_ver()[0] != "glibc" or not machine.HUGE_PAGES.exists():
        return {"system": "", "state": "not available here"}
    system = machine.HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if system == "never":
        state = "off in the system"
    elif os.environ.get("ARGOSY_HUGE_PAGES") == "0":
        state = "off by ARGOSY_HUGE_PAGES"
    elif "glibc.malloc.hugetlb=0" in tunables:
        state = "off by GLIBC_TUNABLES"
    else:
        state = "asked for"
    return {"system": system, "state": state}


def kernels() -> dict[str, str]:
    """Returns the library of compiled kernels, which is built if necessary, or the reason why there is none."""
    try:
        return {"library": str(library.built_library()), "why_not": ""}
    except library.Unavailable as e:
        return {"library": "", "why_not": str(e)}


def can_write(folder: Path) -> bool:
    """Whether files can be created in a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _disk(folder: Path) -> dict[str, Any]:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return {"path": str(folder), "free_bytes": None, "total_bytes": None}
    return {"path": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}


def _contents(folder: Path | None) -> dict[str, int]:
    try:
        sizes = [f.stat().st_size for f in (folder.iterdir() if folder else ()) if f.is_file()]
    except OSError:
        sizes = []
    return {"programs": len(sizes), "bytes": sum(sizes)}


def _open_files() -> int | None:
    try:
        import resource
    # Not a Unix system.
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _clock_behind_s() -> float:
    return max(0.0, Path(__file__).stat().st_mtime - time.time())
