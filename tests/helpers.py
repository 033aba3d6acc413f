"""Where tests find the shared data and described TPUs, what this machine can do, how they compare and listen, and what is slow."""

import ctypes
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.run.view import Quiet

Clock = Callable[[str], AbstractContextManager[None]]
"""What the fixture `clock` is."""

DATA = Path(os.environ.get("ARGOSY_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")


def shared(name: str) -> Path:
    """A file of the shared test data. Missing: the test is skipped by name, and fails under CI=true."""
    path = DATA / name
    if not path.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"shared test data missing: {name} (looked in {DATA})")
        pytest.skip(f"shared test data missing: {name}")
    return path


def stories_model() -> Path:
    """The folder of stories260K."""
    return shared("models/stories260k")


def stories_text() -> Path:
    """A text of the kind that stories260K was trained on."""
    return shared("text/tinystories_sample.txt")


def free_port() -> int:
    """A port that nobody has now; package code holds one instead (`launch.ports`)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python_script(code: str) -> str:
    """A file that runs as Python by its own, wherever Python is: the kernel splits a first line at blanks, and takes 127 bytes."""
    return f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n'''\n{code}"


def rounding(terms: int, products: int) -> float:
    """The largest relative difference between two float32 programs for the same function, on any processor.

    A sum of `terms` numbers in another order differs by eps sqrt(terms), since its roundings are a random walk; those of products
    that follow each other add up.
    """
    return 2.0**-23 * terms**0.5 * products


# Of small models against another implementation: sums of 60 numbers, 8 layers of six products one after the other, 4.4e-5.
LOGIT_ROUNDING = rounding(60, 8 * 6)


def relative(a, b) -> float:
    """Largest difference as a share of the largest magnitude of `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return float(np.abs(a - b).max() / np.abs(b).max())


def described_tpus(monkeypatch: pytest.MonkeyPatch, topology: str) -> list[Any]:
    """The devices of a TPU topology such as "v5e:2x2", for which libtpu compiles without a TPU. Without libtpu the test is skipped."""
    if not find_spec("libtpu"):
        pytest.skip("libtpu is not installed: no TPU can be described")
    from jax.experimental import topologies

    alone = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3"}
    # libtpu ends the process over a flag of XLA that it does not know.
    for key, value in (alone | {"XLA_FLAGS": ""}).items():
        monkeypatch.setitem(os.environ, key, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def default(*defaults: Any, of: Iterable[Any]) -> list[Any]:
    """Parameters of a test: these are tried by default, the others are slow. A tuple is one value for each argument."""
    values = list(of)
    assert all(value in values for value in defaults)
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if value in defaults else pytest.mark.slow)
        for value in values
    ]


def can_confine() -> bool:
    """Whether this machine has what the sandbox needs, found without the sandbox: its tests must not be left out where it is broken."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        return False
    return ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


class Heard(Quiet):
    """A view of a run that keeps what was said."""

    def __init__(self) -> None:
        self.words = ""

    def say(self, text: str) -> None:
        self.words += text + "\n"


def numbers(run: Path, name: str) -> dict[int, float]:
    """A metric of a run, by step."""
    from argosy.core.storage import Store
    from argosy.observe.metrics import by_step, read

    return by_step(read(Store(run)), name)


def flip_bit(a: Any, device: int, bit: int) -> Any:
    """The array with one bit of one device's copy flipped."""
    import jax

    parts = [np.array(shard.data) for shard in a.addressable_shards]
    parts[device].view(np.uint32).reshape(-1)[0] ^= np.uint32(1 << bit)
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, a.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(a.shape, a.sharding, placed)


def later(y: Any, seconds: float) -> Any:
    """The same array after a while, with its gradient: a stand-in for what is slow."""
    import jax

    def wait(a: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(a)

    @jax.custom_vjp
    def slept(y: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    slept.defvjp(lambda y: (slept(y), None), lambda _, g: (g,))
    return slept(y)
