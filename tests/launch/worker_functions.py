"""What tests call in workers."""

import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from argosy.launch.workers import here

DTYPES = ["float32", "bfloat16", "int4", "float8_e4m3fn", "bool", "int8", "complex64", "uint32"]


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """The same in every process."""
    integers = np.random.default_rng(seed).integers(0, 100, shape)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return ((integers % 7) if dtype == "int4" else integers).astype(kind)


def spread(shape: tuple[int, ...], axes: tuple[Any, ...], dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Those numbers, over the mesh."""
    full = numbers(shape, dtype, seed)
    return jax.make_array_from_callback(
        full.shape, NamedSharding(here().mesh, PartitionSpec(*axes)), lambda index: full[index]
    )


def everything() -> dict[str, Any]:
    rows = {dtype: spread((4, 6), ("x",), dtype, seed) for seed, dtype in enumerate(DTYPES)}
    arrays = {"numpy": np.arange(5, dtype=np.float32), "mine": jnp.arange(3)}
    odd = {"empty": spread((0, 4), ()), "scalar": spread((), ()), "plain": (3, "words", None, 2.5, True, np.float32(1.5))}
    return {"rows": rows, "own": arrays, "odd": odd}


def differences(array: jax.Array, shape: tuple[int, ...], axes: tuple[Any, ...], dtype: str, seed: int = 0) -> list[str]:
    """Where the shards of an array are not those of these numbers."""
    full, place = numbers(shape, dtype, seed), NamedSharding(here().mesh, PartitionSpec(*axes))
    problems = [] if array.sharding == place and array.dtype == full.dtype else [f"{array.sharding} {array.dtype}"]
    return problems + [str(shard.index) for shard in array.addressable_shards if (np.asarray(shard.data) != full[shard.index]).any()]


def where() -> tuple[str, int, int, dict[str, int], int]:
    place = here()
    return place.group, place.rank, place.processes, dict(place.mesh.shape), os.getpid()


def rank() -> int:
    return here().rank


def product(mine: jax.Array, by: int = 2) -> jax.Array:
    """The sum over all devices, which the processes compute together."""
    return jax.jit(lambda a: (a * by).sum(), out_shardings=NamedSharding(here().mesh, PartitionSpec()))(mine)


def add(total: Any, more: np.ndarray) -> Any:
    return jax.tree.map(lambda a: a + more, total)


def meet(mine: str, other: str, seconds: float = 20.0) -> bool:
    """Whether somebody makes the other file in time, after this one."""
    Path(mine).touch()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if Path(other).exists():
            return True
        time.sleep(0.01)
    return False


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def says(text: str) -> int:
    print(text)
    return os.getpid()


def starts_another() -> int:
    """A process that outlives this call."""
    return subprocess.Popen(["sleep", "1000"]).pid


def fails(ranks: tuple[int, ...] = (0, 1, 2)) -> int:
    if here().rank in ranks:
        raise ValueError(f"no\nway in {here().rank}")
    return 1


def fails_alone() -> Any:
    if here().rank == 1:
        raise ValueError("only here")
    return product(spread((4,), ("x",)))


def ends(code: int) -> None:
    print("my last words", file=sys.stderr, flush=True)
    os._exit(code)


class Thing:
    alive: ClassVar["weakref.WeakSet[Thing]"] = weakref.WeakSet()

    def __init__(self, megabytes: int = 1):
        self.data, self.asked = np.ones(megabytes << 20, np.uint8), 0
        Thing.alive.add(self)

    def ask(self, by: int) -> int:
        self.asked += by
        return self.asked


def things() -> int:
    return len(Thing.alive)


def arrays() -> int:
    return len(jax.live_arrays())


def add_donated(state: jax.Array) -> jax.Array:
    return jax.jit(lambda a: a + 1, donate_argnums=0)(state)


STARTS: list[int] = []


def start(number: int) -> dict[str, int]:
    STARTS.append(number)
    return {"number": number, "starts": len(STARTS)}
