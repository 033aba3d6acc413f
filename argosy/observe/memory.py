"""Memory of this process: what it takes, and what it took at most."""

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """The largest resident set of this process so far. Linux's own figure where there is one: getrusage reports at least the
    size of the process that started this one."""
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The resident set of this process now; its peak where the system does not say."""
    found = _status("VmRSS")
    return peak_bytes() if found is None else found


def _status(name: str) -> int | None:
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
