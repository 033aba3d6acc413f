"""Where this process runs: versions, processor, memory, variables that matter. Reads and never changes anything.

Never tells a host name, a user or an address. Limits of a container count as the machine's: a process that is granted 2 of
64 cores has 2. Devices are asked of jax in a process of its own, because a driver that is broken hangs or aborts.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.observe.readable import sized

PACKAGES = ("argosy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_dtypes", "safetensors",
            "tokenizers", "sentencepiece", "pydantic", "rich", "typer")  # fmt: skip
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "qwix", "tokamax", "xprof")
PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_", "ARGOSY_", "GLIBC_",
            "MALLOC_")  # fmt: skip
NAMES = ("TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS", "LD_PRELOAD", "XDG_CACHE_HOME", "PYTHONHASHSEED", "HF_HUB_OFFLINE")
DEVICES_WITHIN_S = 120.0

ASK = """
import json, jax
told = []
for d in jax.local_devices():
    stats = d.memory_stats() or {}
    told.append({"kind": d.device_kind, "platform": d.platform, "memory_bytes": stats.get("bytes_limit"),
                 "memory_used_bytes": stats.get("bytes_in_use")})
print("\\n" + json.dumps({"backend": jax.default_backend(), "devices": told}))
"""


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on; plug-ins only where they are installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """System, processor, vector width in bits, cores this process may use, memory in bytes."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    total, free = memory_bytes()
    return {
        "system": system,
        "processor": processor(),
        "vector_bits": vector_bits(),
        "cores": cores(),
        "memory_bytes": total,
        "memory_free_bytes": free,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    """Its name, as the system tells."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def vector_bits() -> int | None:
    """The widest vectors of the processor; None where that cannot be told."""
    flags = set(_read("/proc/cpuinfo").split())
    for name, bits in (("avx512f", 512), ("avx2", 256), ("avx", 256), ("sse2", 128), ("asimd", 128)):
        if name in flags:
            return bits
    return 128 if platform.machine() in ("arm64", "aarch64") else None


def cores() -> float:
    """That this process may use: its affinity, or the quota of its control group where that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        return min(allowed, round(int(quota[0]) / int(quota[1]), 2))
    return allowed


def memory_bytes() -> tuple[int | None, int | None]:
    """In all, and free; of the control group where that has less."""
    told = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(told[k].split()[0]) * 1024 if k in told else None for k in ("MemTotal", "MemAvailable"))
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and (total is None or int(limit) < total):
        total = int(limit)
        free = min(free or total, total - int(used)) if used.isdecimal() else free
    return total, free


def check_fits(needed: int, what: str) -> None:
    """That so many bytes fit into this machine's memory at all: the system ends a process that takes too much, with no word. What
    is in use just now is not counted: most of it may be files that the system lets go.

    Raises:
        BadInput: they do not.
    """
    total = memory_bytes()[0]
    if total is not None and needed > total:
        hint = "a smaller model; `argosy models show` tells what one needs"
        raise BadInput(f"{what} need {sized(needed)}, and this machine has {sized(total)} of memory", hint=hint)


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that change what is computed, how fast, or where."""
    return {k: v for k, v in sorted(environment.items()) if k in NAMES or k.startswith(PREFIXES)}


def devices(timeout_s: float = DEVICES_WITHIN_S) -> dict[str, Any]:
    """{"backend", "devices": [{kind, platform, memory_bytes}]}, or {"error": why jax has none}."""
    try:
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"jax did not answer within {timeout_s:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"jax ended with code {done.returncode}"}


def gpus() -> list[str]:
    """Names of the GPUs that NVIDIA's own tool sees."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
