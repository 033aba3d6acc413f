"""The number of cores that this process may use, which in a container is less than that of the machine.

`os.cpu_count` counts the cores of the machine. More threads than allowed cores slow each other down: they use up the quota of the
control group early in each period, and all of them stop for the rest of it.
"""

import math
import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def cores() -> float:
    """The number of cores of this process: the number in its affinity, or the quota of its control group if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else min(allowed, quota)


def core_count() -> int:
    """The number of threads or processes that the cores can keep busy; at least 1."""
    return max(1, math.ceil(cores()))


def _quota() -> float | None:
    """The quota of the control group (version 2 or 1) in cores; None: there is no limit."""
    numbers = _read("cpu.max").split() or [_read("cpu/cpu.cfs_quota_us").strip(), _read("cpu/cpu.cfs_period_us").strip()]
    if len(numbers) == 2 and all(number.isdecimal() and int(number) for number in numbers):
        return round(int(numbers[0]) / int(numbers[1]), 2)
    return None


def _read(name: str) -> str:
    try:
        return (GROUPS / name).read_text()
    except OSError:
        return ""
