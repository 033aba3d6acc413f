"""Describes the environment of this process: versions, processor, memory, relevant environment variables. Changes nothing.

Host names, users and addresses are never reported. Limits of a container count as limits of the machine: a process that may use 2 of
64 cores has 2. jax is asked for its devices in a separate process, because a broken driver may hang or abort.
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
from argosy.core.process.cores import cores
from argosy.core.process.signals import before_leaving
from argosy.observe.readable import format_bytes

PACKAGES = ("argosy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_dtypes", "safetensors",
            "tokenizers", "sentencepiece", "pydantic", "rich", "typer")  # fmt: skip
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "qwix", "tokamax", "xprof")
PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_", "ARGOSY_", "GLIBC_",
            "MALLOC_")  # fmt: skip
NAMES = ("TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS", "LD_PRELOAD", "XDG_CACHE_HOME", "PYTHONHASHSEED", "HF_HUB_OFFLINE")
DEVICES_WITHIN_S = 120.0

ASK = """
import json, jax
found = []
for d in jax.local_devices():
    stats = d.memory_stats() or {}
    found.append({"kind": d.device_kind, "platform": d.platform, "memory_bytes": stats.get("bytes_limit"),
                 "memory_used_bytes": stats.get("bytes_in_use")})
print("\\n" + json.dumps({"backend": jax.default_backend(), "devices": found}))
"""


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect results. Plug-ins are listed only if they are installed."""
    installed = {"python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                installed[name] = "not installed"
    return installed


def machine() -> dict[str, Any]:
    """Returns the system, the processor, its vector width in bits, the cores available to this process, and the memory in bytes."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    total, free = memory_bytes()
    return {
        "system": system,
        "processor": processor_name(),
        "vector_bits": vector_bits(),
        "cores": cores(),
        "memory_bytes": total,
        "memory_free_bytes": free,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def processor_name() -> str:
    """Returns the name of the processor, as the system reports it."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def vector_bits() -> int | None:
    """Returns the width of the processor's widest vectors in bits; None if unknown."""
    flags = set(_read("/proc/cpuinfo").split())
    for name, bits in (("avx512f", 512), ("avx2", 256), ("avx", 256), ("sse2", 128), ("asimd", 128)):
        if name in flags:
            return bits
    return 128 if platform.machine() in ("arm64", "aarch64") else None


def memory_bytes() -> tuple[int | None, int | None]:
    """Returns total and free memory in bytes, None where unknown. They are those of the control group if its limit is lower."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(fields[k].split()[0]) * 1024 if k in fields else None for k in ("MemTotal", "MemAvailable"))
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and (total is None or int(limit) < total):
        total = int(limit)
        free = min(free or total, total - int(used) + _droppable()) if used.isdecimal() else free
    return total, free


def _droppable() -> int:
    """Returns the bytes of cached files that count as memory of the control group, which the system drops when it needs memory."""
    fields = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return int(fields.get("inactive_file", 0))


def check_fits(needed: int, subject: str) -> None:
    """Checks that this many bytes fit into the total memory of this machine, because the system kills a process that takes too much
    without a message. Memory in use is not subtracted, because most of it may be cached files, which the system drops.

    Args:
        needed: the number of bytes.
        subject: what needs them, for the error.

    Raises:
        BadInput: the bytes do not fit.
    """
    total = memory_bytes()[0]
    if total is not None and needed > total:
        hint = "take a smaller model; `argosy models show` prints subject each needs"
        raise BadInput(f"{subject} need {format_bytes(needed)}, and this machine has {format_bytes(total)} of memory", hint=hint)


def environment_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that affect results, speed or the choice of devices."""
    return {k: v for k, v in sorted(environment.items()) if k in NAMES or k.startswith(PREFIXES)}


def device_facts(timeout_s: float = DEVICES_WITHIN_S) -> dict[str, Any]:
    """Asks jax for its devices in a separate process. Returns {"backend", "devices": [{kind, platform, memory_bytes, ...}]}, or
    {"error": the reason why jax has no devices}."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", ASK], stdout=pipe, stderr=pipe, text=True)
    # Ctrl-C reaches the child too, but the child may ignore it while it imports jax.
    with child, before_leaving(child.kill):
        try:
            answer, errors = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return {"error": f"jax did not answer within {timeout_s:.0f} s"}
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        return json.loads(answer.strip().splitlines()[-1])
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"jax ended with code {child.returncode}"}


def gpu_names() -> list[str]:
    """Returns the names of the GPUs that nvidia-smi lists; empty without nvidia-smi."""
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
