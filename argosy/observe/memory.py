"""Measures the memory of this process: current and peak."""

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Returns the peak resident set of this process in bytes. On Linux it is read from /proc, because getrusage reports at least the
    size of the parent process."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Returns the current resident set of this process in bytes; the peak if the system does not report the current one."""
    resident = _status("VmRSS")
    return peak_bytes() if resident is None else resident


def _status(name: str) -> int | None:
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
