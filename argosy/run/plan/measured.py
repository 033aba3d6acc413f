"""What work costs on this machine: a product and a copy, measured in half a second and kept for the next time.

Other processes slow a measurement, and never speed it up, so the best of all that were made counts.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from argosy.core.caches import cache_home
from argosy.core.process.cores import core_count
from argosy.observe.environment import processor_name
from argosy.observe.hardware import CHIPS
from argosy.observe.hlo.estimate import Prices
from argosy.run.plan.speed import PRODUCTS, prices_of

# Sizes of the product and of the copy, and seconds for each.
SIZE, COPIED, SPENT_S = 512, 1 << 24, 0.2


@cache
def prices_here(platform: str, again: bool = True) -> Prices | None:
    """What work costs here; on accelerators from their table, None for a kind that it lacks.

    Args:
        again: whether a processor that was measured before is measured again.
    """
    if platform != "cpu":
        kind = jax.devices()[0].device_kind
        chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
        return None if chip is None else prices_of(chip)
    stored = _stored()
    flops, moved = stored or (0.0, 0.0)
    if again or not stored:
        measured = _measured()
        flops, moved = max(flops, measured[0]), max(moved, measured[1])
        _store(flops, moved)
    return Prices(flops_per_s=PRODUCTS[platform] * flops, bytes_per_s=moved, ring_bytes_per_s=moved, peak_flops_per_s=flops)


def _measured() -> tuple[float, float]:
    """FLOPs and bytes a second."""
    x, long = jnp.ones((SIZE, SIZE)), jnp.ones((COPIED,), jnp.float32)
    product, copied = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    flops = 2 * SIZE**3 / _best(lambda: product(x).block_until_ready())
    return flops, 8 * COPIED / _best(lambda: copied(long).block_until_ready())


def _best(call: Callable[[], object]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + SPENT_S
    while (began := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - began)
    return best


def _file() -> Path | None:
    home = cache_home()
    return None if home is None else home / "speed.json"


def _key() -> str:
    return f"{processor_name()}, {core_count()} cores, {jax.device_count()} devices"


def _stored() -> tuple[float, float] | None:
    """What was measured on this kind of processor before; None if nothing was."""
    path = _file()
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text(encoding="utf-8"))[_key()]
            return float(found["flops_per_s"]), float(found["bytes_per_s"])
    return None


def _store(flops: float, moved: float) -> None:
    path = _file()
    if path is None:
        return
    with suppress(OSError):
        every = {}
        with suppress(OSError, ValueError):
            every = dict(json.loads(path.read_text(encoding="utf-8")))
        every[_key()] = {"flops_per_s": flops, "bytes_per_s": moved}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(every), encoding="utf-8")
        draft.replace(path)
