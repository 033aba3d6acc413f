"""Fingerprints of programs, which are the same in every process. Equal fingerprints mean equal programs, on this machine, with these
packages.

A function's fingerprint is made of its import path and the values that it closes over, a model's of its graph. All sources of argosy
are hashed, and other packages count by their versions. Only functions and classes of these packages therefore have fingerprints.
Anything else that a program may depend on, such as a user's own class, raises `NoFingerprint`.
"""

import dataclasses
import enum
import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pydantic

from argosy.ops.native import library
from argosy.ops.op import requested_implementations

# Packages that are identified by their version. argosy is identified by a hash of its sources.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "qwix", "tokamax")
TRUSTED = frozenset(["argosy", "builtins", "functools", "operator", *PACKAGES])
# The folder of the package argosy.
PACKAGE = Path(__file__).parents[2]
# Subpackages whose code is in no stored program, and settings, whose values are in the arguments that programs are built from.
LATER = frozenset(
    ["evals", "rl", "export", "web", "predict", "serve", "client", "launch", "run", "jobs", "cli", "configs", "__pycache__"]
)
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "CUDA_VISIBLE_DEVICES")
# Prefixes of jax's options that change no program, for caches and logging.
PLAIN_OPTIONS = ("jax_compilation_cache", "jax_enable_compilation_cache", "jax_persistent_cache", "jax_log", "jax_dump", "jax_pprint")
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class NoFingerprint(Exception):
    """A value has no fingerprint that would be the same in another process."""


def fingerprint(*values: Any) -> str:
    """Computes a hash of values that is the same in every process.

    Raises:
        NoFingerprint: a value cannot be identified in other processes.
    """
    digest = hashlib.sha256()
    for word in _words(values):
        digest.update(word.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _words(value: Any) -> Iterator[str]:
    if (write := _writer(type(value))) is not None:
        yield from write(value)
    elif type(value).__name__ == "GraphDef":
        # Compares the class by name, since fingerprints of a bundle's programs are computed where flax is not imported.
        yield _of_graph(value)
    elif dataclasses.is_dataclass(value):
        yield _import_path(type(value))
        yield from _words([(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)])
    elif type(value).__name__ == "NodeRef":
        yield f"node {value.index}"
    elif callable(value) and hasattr(value, "__qualname__"):
        yield _import_path(value)
    else:
        raise NoFingerprint(f"{type(value).__module__}.{type(value).__qualname__}")


def _import_path(value: Any) -> str:
    """Returns the import path of a class or function.

    Raises:
        NoFingerprint: it cannot be imported, or is not from a trusted package.
    """
    module, name = value.__module__, value.__qualname__
    imported: Any = sys.modules.get(module or "")
    for part in name.split("."):
        imported = getattr(imported, part, None)
    if imported is not value or module.partition(".")[0] not in TRUSTED:
        raise NoFingerprint(f"{module}.{name}")
    return f"{module}.{name}"


def _function(value: types.FunctionType) -> Iterator[str]:
    module = value.__module__ or ""
    if "<" not in value.__qualname__:
        yield _import_path(value)
        return
    if module.partition(".")[0] not in TRUSTED:
        raise NoFingerprint(f"{module}.{value.__qualname__}")
    yield f"{module}.{value.__qualname__}:{value.__code__.co_firstlineno}"
    names = value.__code__.co_freevars
    yield from _words(dict(zip(names, (cell.cell_contents for cell in value.__closure__ or ()), strict=True)))
    yield from _words((value.__defaults__, value.__kwdefaults__))


def _sequence(value: Any) -> Iterator[str]:
    yield f"{_import_path(type(value))} {len(value)}"
    for element in value:
        yield from _words(element)


def _mapping(value: Any) -> Iterator[str]:
    yield f"{_import_path(type(value))} {len(value)}"
    for key, element in value.items():
        yield from _words(key)
        yield from _words(element)


def _set(value: Any) -> Iterator[str]:
    yield f"{type(value).__name__} {len(value)}"
    yield from sorted(fingerprint(element) for element in value)


def _array(value: Any) -> Iterator[str]:
    a = np.ascontiguousarray(value)
    if a.dtype.hasobject:
        raise NoFingerprint("an array of objects")
    yield f"array {a.dtype} {a.shape} {hashlib.sha256(a.tobytes()).hexdigest()}"


def _tree(value: Any) -> Iterator[str]:
    text = str(value)
    if " at 0x" in text:
        raise NoFingerprint("a tree that holds an object")
    yield text


def _pydantic(value: pydantic.BaseModel) -> Iterator[str]:
    yield _import_path(type(value))
    yield from _words([(name, getattr(value, name)) for name in type(value).model_fields])


def _sharding(value: Any) -> Iterator[str]:
    if isinstance(value, jax.sharding.NamedSharding):
        mesh = value.mesh
        ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, jax.sharding.Mesh) else []
        yield f"{mesh.shape_tuple} {mesh.axis_types} {ids} {value.spec!r} {value.memory_kind}"
    elif isinstance(value, jax.sharding.SingleDeviceSharding):
        yield f"device {[device.id for device in value.device_set]} {value.memory_kind}"
    else:
        raise NoFingerprint(f"a {type(value).__name__}")


@functools.lru_cache(maxsize=64)
def _of_graph(value: Any) -> str:
    # Cached, because a graph of 30 layers takes 0.1 s and several programs share a graph.
    return fingerprint(value.nodes, value.attributes, value.num_leaves)


def _partial(value: Any) -> Iterator[str]:
    yield from _words((value.func, value.args, value.keywords))


# The first kind that fits a value writes its words.
_WRITERS: list[tuple[Any, Callable[[Any], Iterator[str]]]] = [
    (enum.Enum, lambda value: iter([f"{_import_path(type(value))}.{value.name}"])),
    (PLAIN_TYPES, lambda value: iter([f"{type(value).__name__} {value!r}"])),
    (np.dtype, lambda value: iter([f"dtype {value}"])),
    (np.generic, lambda value: iter([f"{value.dtype} {value.item()!r}"])),
    (np.ndarray, _array),
    (type, lambda value: iter([_import_path(value)])),
    (jax.ShapeDtypeStruct, lambda value: _words((value.shape, value.dtype, value.sharding, value.weak_type))),
    (jax.sharding.Sharding, _sharding),
    (jax.tree_util.PyTreeDef, _tree),
    ((tuple, list), _sequence),
    ((set, frozenset), _set),
    (Mapping, _mapping),
    (pydantic.BaseModel, _pydantic),
    (functools.partial, _partial),
    (types.FunctionType, _function),
]


@functools.cache
def _writer(kind: type) -> Callable[[Any], Iterator[str]] | None:
    return next((write for base, write in _WRITERS if issubclass(kind, base)), None)


@functools.cache
def environment_fingerprint(sources: bool = True) -> str:
    """Computes the fingerprint of what affects the compilation of all programs and does not change in a process: sources, packages and
    devices.

    Args:
        sources: whether argosy's sources are included.

    Raises:
        NoFingerprint: a package has no version.
    """
    devices = jax.devices()
    client = devices[0].client
    return fingerprint(
        _sources() if sources else "",
        {name: version(name) for name in PACKAGES if find_spec(name)},
        sys.version,
        platform.platform(),
        _processor(),
        {name: os.environ.get(name) for name in VARIABLES},
        client.platform,
        client.platform_version,
        [(device.id, device.device_kind) for device in devices],
        jax.process_count(),
    )


def options_fingerprint() -> str:
    """Computes the fingerprint of the current tracing options: jax's options, requested implementations, and whether argosy's kernels
    for CPUs are available."""
    # An attribute of jax.config is the value in this thread. Some options have no attribute.
    settings = {name: getattr(jax.config, name, value) for name, value in sorted(jax.config.values.items())}
    options = {name: str(value) for name, value in settings.items() if not name.startswith(PLAIN_OPTIONS)}
    return fingerprint(options, requested_implementations(), library.unavailable() == "")


def _sources() -> str:
    """Computes the hash of all files of argosy that may affect what a program computes."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*")):
        room, *rest = file.relative_to(PACKAGE).parts
        if file.is_file() and room not in LATER and "__pycache__" not in rest:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _processor() -> list[str]:
    """Returns the properties of the CPU that machine code depends on: model, features, and the number of cores available."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        facts = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part", "isa"))]
    except OSError:
        facts = [platform.processor()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [platform.machine(), *facts, f"{cores} cores"]
