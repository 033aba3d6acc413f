"""Times each local device by itself, with a program that has no collectives: products of matrices, compiled once.

Between two steps, when the devices have nothing else to do. How long it takes says how fast a device is at that moment (its clock, its
temperature, who else uses it), which the time of a step does not: that is the same on all devices.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.parallel import processes

# What one timing should take, and how often it is made at a time: the shortest counts, since another program may have been in the way.
LEAST_S = 0.002
TIMES = 3
# Side of the matrices, and their type: a few megabytes.
SIDE = {"cpu": 256}
OTHER_SIDE = 2048


class Probe:
    """Times devices.

    Args:
        devices: devices of this process, all of one kind.

    All processes create one at the same time: the first decides how many products take `LEAST_S`.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices, platform = list(devices), devices[0].platform
        side, dtype = SIDE.get(platform, OTHER_SIDE), jnp.float32 if platform == "cpu" else jnp.bfloat16
        # Of norm 1, so that the values stay as large as they are.
        values = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32) / np.float32(np.sqrt(side))
        self._matrices = [jax.device_put(values.astype(dtype), device) for device in self.devices]
        self._program = jax.jit(_products)
        self._pool = ThreadPoolExecutor(len(self.devices), "probe") if len(self.devices) > 1 else None
        self._products = 1
        self()
        product_s = max(self())
        self._products = processes.broadcast("probe", lambda: max(1, round(LEAST_S / product_s)))
        start = time.perf_counter()
        self()
        # All of it, as the steps wait for it.
        self.took_s = time.perf_counter() - start

    def __call__(self) -> list[float]:
        """Seconds of each device, all at once. Nothing else should be under way on them."""
        if self._pool is None:
            return [self._timed(self._matrices[0])]
        return list(self._pool.map(self._timed, self._matrices))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _timed(self, matrix: Any) -> float:
        times = []
        for _ in range(TIMES):
            start = time.perf_counter()
            jax.block_until_ready(self._program(matrix, self._products))
            times.append(time.perf_counter() - start)
        return min(times)


def _products(matrix: Any, count: Any) -> Any:
    """The matrix times itself, again and again; clipped, so that no value grows."""
    return jax.lax.fori_loop(0, count, lambda _, x: jnp.clip(x @ matrix, -1, 1), matrix)
