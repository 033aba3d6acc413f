"""The files that untrusted code can use: the standard library, which it may read, and a folder, which is removed afterwards."""

import json
import os
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path

from argosy.core.errors import ArgosyError


@cache
def library() -> tuple[list[str], list[str], bool]:
    """Finds the standard library, without installed packages.

    Returns:
        The paths of its files and shared objects, the folders that imports list, and whether every user may read them.
    """
    completed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", OBJECTS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
    )
    try:
        about = json.loads(completed.stdout)
    except ValueError:
        raise ArgosyError("the files of the standard library cannot be found", hint=f"{sys.executable} does not run") from None
    folders = [path for path in about["path"] if os.path.isdir(path)]
    reads = [
        entry.path for path in folders for entry in os.scandir(path) if entry.name not in ("site-packages", "dist-packages")
    ]
    reads += [path for path in about["path"] if os.path.isfile(path)]
    reads += [path for path in about["objects"] if not any(path.startswith(f"{folder}/") for folder in reads)]
    reads += ["/etc/ld.so.cache", "/dev/urandom"]
    return reads, folders, all(map(everybody_reaches, [*folders, *about["objects"]]))


# Imports every extension module, then tells which shared objects that took.
OBJECTS = """
import importlib.machinery as m, json, os, sys
for folder in list(sys.path):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        module = name.partition(".")[0]
        if name.endswith(tuple(m.EXTENSION_SUFFIXES)) and not module.startswith(("_test", "xx", "_tkinter", "_ctypes_test")):
            try: __import__(module)
            except ImportError: pass
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({"path": sys.path, "objects": sorted(p for p in paths if ".so" in p)}))
"""


def everybody_reaches(path: str) -> bool:
    """Whether a user without any rights can read this path."""
    real = Path(os.path.realpath(path))
    return all(parent.stat().st_mode & 0o001 for parent in real.parents) and bool(real.stat().st_mode & 0o004)


def remove(folder: str) -> None:
    """Removes the folder of code that has ended. Paths in it may be longer than the system accepts, so deep folders are moved up first.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.rename(inner.path, os.path.join(folder, secrets.token_hex()))
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
