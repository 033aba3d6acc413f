"""Measures the speed of this machine: matrix products, copies, and reading weights. A measurement takes a second and is stored.

Other processes can slow a measurement down but never speed it up, so the best of all measurements counts.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from argosy.core.caches import cache_home
from argosy.core.process.cores import core_count
from argosy.observe.environment import processor_name
from argosy.observe.hardware import CHIPS
from argosy.observe.hlo.estimate import Prices
from argosy.ops.native import library, products
from argosy.ops.native.products import pack_panels
from argosy.run.plan.speed import PRODUCTS, prices_of

# Sizes of the product and of the copy, and seconds for each.
SIZE, COPIED, SPENT_S = 512, 1 << 24, 0.2
# Rows and columns of the weight that is read: 64 MiB, more than caches hold.
READ = 4096


class Speeds(NamedTuple):
    """The best speeds that were measured.

    flops_per_s: FLOPs of matrix products per second.
    bytes_per_s: bytes that copies read and write per second.
    read_bytes_per_s: bytes of weights that are read per second.
    """

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


@cache
def prices_here(platform: str, again: bool = True) -> Prices | None:
    """Returns the speeds of this machine's devices. CPUs are measured. The speeds of accelerators are from a table; the result is None
    for a kind that the table lacks.

    Args:
        again: whether a CPU that was measured before is measured again.
    """
    if platform != "cpu":
        kind = jax.devices()[0].device_kind
        chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
        return None if chip is None else prices_of(chip)
    speeds = stored = _stored()
    if again or stored is None:
        speeds = Speeds(*map(max, stored or Speeds(), _measured()))
        _store(speeds)
    assert speeds is not None
    flops, bandwidth, read = speeds
    share = PRODUCTS[platform]
    return Prices(share * flops, bandwidth, ring_bytes_per_s=bandwidth, peak_flops_per_s=flops, read_bytes_per_s=read)


def _measured() -> Speeds:
    x, long = jnp.ones((SIZE, SIZE)), jnp.ones((COPIED,), jnp.float32)
    product, copied = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    flops = 2 * SIZE**3 / _best(lambda: product(x).block_until_ready())
    bandwidth = 8 * COPIED / _best(lambda: copied(long).block_until_ready())
    return Speeds(flops, bandwidth, 4 * READ**2 / _best(_row_product()))


def _row_product() -> Callable[[], object]:
    """Makes a function that multiplies one row with a large weight, as a decode step does, by a compiled kernel if there is one."""
    row, weight = jnp.ones((1, READ)), jnp.ones((READ, READ), jnp.float32)
    library.load()
    if library.unavailable():
        by_xla = jax.jit(lambda x, w: x @ w)
        return lambda: by_xla(row, weight).block_until_ready()
    # A third is no bfloat16, in which weights take half as many bytes.
    panels, by_kernel = pack_panels(weight / 3, 1, True), jax.jit(products.product)
    return lambda: by_kernel(row, panels).block_until_ready()


def _best(call: Callable[[], object]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + SPENT_S
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _file() -> Path | None:
    home = cache_home()
    return None if home is None else home / "speed.json"


def _key() -> str:
    return f"{processor_name()}, {core_count()} cores, {jax.device_count()} devices"


def _stored() -> Speeds | None:
    """Returns the stored speeds of this kind of processor; None if it was not measured before."""
    path = _file()
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            speeds = json.loads(path.read_text(encoding="utf-8"))[_key()]
            return Speeds(*(float(speeds[name]) for name in Speeds._fields))
    return None


def _store(speeds: Speeds) -> None:
    path = _file()
    if path is None:
        return
    with suppress(OSError):
        every = {}
        with suppress(OSError, ValueError):
            every = dict(json.loads(path.read_text(encoding="utf-8")))
        every[_key()] = speeds._asdict()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(every), encoding="utf-8")
        draft.replace(path)
