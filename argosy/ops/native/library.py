"""Builds the kernels with this machine's C++ compiler, once, and registers them with XLA.

    library.load()        loads the kernels; builds them first if needed, which takes 10 to 20 seconds on two cores
    library.unavailable() why programs may not call the kernels; "" if they may

The library is stored in `argosy/native` under ~/.cache ($XDG_CACHE_HOME). Its name is a hash of everything that decides its content:
source, headers, compiler, flags and processor. Nothing is downloaded. Without a compiler, with $ARGOSY_NATIVE=0, or if building fails,
programs use XLA's operations, whose results are equal up to rounding. Nothing here runs on import.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from argosy.core.caches import cache_home
from argosy.core.progress import Say, telling

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cc", "blocks.cc", "integers.cc", "matrix.cc"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("codes.h", "parallel.h", "tiles.h"))
# The names of the kernels in XLA, which are also symbols of the library.
KERNELS = (
    "argosy_product", "argosy_blocks_product", "argosy_integer_product", "argosy_paged_attention", "argosy_matrix_product",
)  # fmt: skip
SWITCH = "ARGOSY_NATIVE"
COMPILED = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
LINKED = ("-shared",)
TIMEOUT_S = 120

_lock = threading.Lock()
# Why the kernels cannot be used; "" if they can, None if loading has not been tried.
_reason: str | None = None
_library: ctypes.CDLL | None = None


def unavailable() -> str:
    """Returns why programs may not call the kernels; "" if they may."""
    return "the kernels were not loaded" if _reason is None else _reason


def failure() -> str:
    """Returns why loading the kernels failed; "" if it did not fail, or if nothing tried to load them (with several devices)."""
    return _reason or ""


def load(say: Say | None = None) -> str:
    """Builds and loads the kernels, once in a process. Returns why they cannot be used; "" if they can.

    Args:
        say: is called with a sentence about what is done, if it takes longer than a second.
    """
    global _reason, _library
    with _lock:
        if _reason is None:
            try:
                import jax

                with telling(say, "building kernels for this processor ..."):
                    _library = ctypes.CDLL(str(built_library()))
                for name in KERNELS:
                    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(_library, name)), platform="cpu")
                _reason = ""
            except Unavailable as e:
                _reason = str(e)
            except OSError as e:
                _reason = f"cannot load what was built: {e}"
        return _reason


def has_amx() -> bool:
    """Whether the kernels are loaded and the processor has matrix units (AMX) that they may use."""
    return _library is not None and bool(_library.argosy_has_amx())


class Unavailable(Exception):
    """The kernels cannot be built or loaded. The message says why."""


def built_library() -> Path:
    """Returns the path of the library, which is built if it does not exist.

    Raises:
        Unavailable: kernels are turned off, or cannot be built here.
    """
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0")
    home = cache_home()
    if home is None:
        raise Unavailable("there is no home directory to keep them in: set XDG_CACHE_HOME")
    compiler = _compiler()
    if compiler is None:
        raise Unavailable("there is no C++ compiler (c++, g++ or clang++; $CXX names another)")
    target = home / "native" / f"kernels-{_key(compiler)}.so"
    try:
        if not target.exists():
            _build(compiler, target)
        _check_owner(target)
    except OSError as e:
        raise Unavailable(f"{target}: {e.strerror or e}") from None
    return target


def _headers() -> Path:
    """Returns the folder of XLA's headers, which jaxlib includes. Does not import jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise Unavailable("jaxlib is not installed")
    return Path(spec.origin).parent / "include"


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@lru_cache(maxsize=4)
def _key(compiler: str) -> str:
    try:
        compiler_version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"{compiler} does not run: {e}") from None
    files = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    parts = [*files, compiler_version, " ".join([*COMPILED, *LINKED]).encode(), version("jaxlib").encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Returns the properties of the processor that the effect of `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    facts = [line for line in lines if line.split("\t")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), platform.processor(), *facts])


def _build(compiler: str, target: Path) -> None:
    """Builds the library in a temporary folder, then renames it, so that processes may build at the same time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder, ThreadPoolExecutor(len(SOURCES)) as threads:
        objects = [str(Path(folder, source.stem).with_suffix(".o")) for source in SOURCES]
        commands = [[*COMPILED, "-isystem", str(_headers()), "-c", str(source), "-o", to] for source, to in zip(SOURCES, objects)]
        list(threads.map(lambda words: _call(compiler, words), commands))
        unfinished = Path(folder, target.name)
        _call(compiler, [*LINKED, *objects, "-o", str(unfinished)])
        unfinished.chmod(0o700)
        unfinished.replace(target)


def _call(compiler: str, words: Sequence[str]) -> None:
    """Runs the compiler.

    Raises:
        Unavailable: the compiler failed. The message has its first error.
    """
    try:
        done = subprocess.run([compiler, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.SubprocessError as e:
        raise Unavailable(f"{compiler}: {e}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise Unavailable(f"{compiler} failed: {first.strip()}")


def _check_owner(target: Path) -> None:
    """Checks that no other user can have written the library, since loading it runs code.

    Raises:
        Unavailable: the file belongs to another user, or others may write it.
    """
    if not hasattr(os, "getuid"):
        return
    status = target.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{target} belongs to another user, or others may write it")
