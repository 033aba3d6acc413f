"""Times each local device with a program of matrix products without collectives, between two steps, when devices are otherwise idle.

The result says how fast a device is at that moment, which depends on its clock, its temperature and other programs that use it. The
time of a step does not say that, because it is the same on all devices.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.parallel import processes

# The least seconds of one timing, and the number of timings per call. The shortest counts, because another program may have disturbed
# the others.
LEAST_S = 0.002
TIMES = 3
# The size of the square matrices on each platform: a few megabytes.
SIDE = {"cpu": 256}
OTHER_SIDE = 2048


class Probe:
    """Times devices. All processes must create their probe at the same time, because the leader decides how many products take
    `LEAST_S`.

    Args:
        devices: devices of this process, all of one kind.
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
        """Returns the seconds that the program takes on each device. All devices run at once, and should not run anything else."""
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
    """Multiplies with the matrix `count` times. Values are clipped, so that they do not grow."""
    return jax.lax.fori_loop(0, count, lambda _, x: jnp.clip(x @ matrix, -1, 1), matrix)
