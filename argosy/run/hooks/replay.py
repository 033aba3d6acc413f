"""Detects silent data corruption. Every few steps, a step is computed twice from the same state, and replicas of the state on different
devices are compared.

The same program with the same inputs gives the same bits. If it does not, a device computed wrong or its memory changed. The state is
copied first, since a step donates its buffers. The two results are compared by checksums that every device computes over its shards.
The cost is an extra step, a copy of the state and two passes over it, every `guard.replay` steps. Reductions over devices spread the
error of one device to all devices. Such an error is detected, but the device cannot be named.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput, some
from argosy.parallel.checksum import by_device, copies, odd_ones

# The metric that holds both checksums.
SUMS = "replay"
# A flag of XLA: no atomic additions.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class Corrupted(ArgosyError):
    """A device computed a step wrong, or the memory of a device changed."""


class Replay:
    """Computes every `every`-th step twice.

    Args:
        places: the shardings of the training state.
        shapes: the shapes of the training state.
        base: the names of frozen weights, which steps neither change nor donate.

    Raises:
        BadInput: programs of these devices are not deterministic.
    """

    def __init__(self, every: int, places: Any, shapes: Any, mesh: Any, base: frozenset[str] = frozenset()):
        if mesh.devices.flat[0].platform == "gpu" and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
            problem = f"guard.replay = {every}: on GPUs a program may sum in another order each time, "
            problem += "which this would take for corruption"
            raise BadInput(problem, hint=f"XLA_FLAGS={DETERMINISTIC} makes it deterministic")
        self.every, self.mesh, self.base = every, mesh, base
        at, _ = jax.tree_util.tree_flatten_with_path(self._moving(places))
        leaves = jax.tree.leaves(self._moving(shapes))
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in at]
        self._sums = by_device([place for _, place in at], mesh)
        self._groups = [copies(place, tuple(a.shape), mesh) for (_, place), a in zip(at, leaves, strict=True)]
        # A step takes the buffer of the random key too.
        out_places = (self._moving(places), places.key)
        self._copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=out_places)

    def __call__(self, update: Callable[[Any, Any], Any], state: Any, batch: Any, step: int) -> Any:
        """Computes a step, twice if it is due. Returns the state and the metrics. If the step was computed twice, the metrics include
        the checksums of both results."""
        if step % self.every:
            return update(state, batch)
        moving, key = self._copied((self._moving(state), state.key))
        copy = replace(state, **(moving | {"rest": state.rest | moving["rest"], "key": key}))
        del moving
        again, _ = update(copy, batch)
        del copy
        # Programs with sums over devices that do not wait for each other may begin in another order on each CPU device, and hang.
        first = jax.block_until_ready(self.sums(again))
        del again
        new, metrics = update(state, batch)
        return new, dict(metrics) | {SUMS: (first, jax.block_until_ready(self.sums(new)))}

    def sums(self, state: Any) -> Any:
        """Computes the checksum of each array of the state on each device, [devices, arrays]."""
        return self._sums(jax.tree.leaves(self._moving(state)))

    def check(self, step: int, sums: tuple[Any, Any]) -> None:
        """Compares the checksums of both results of a step, and those of replicas of the state.

        Raises:
            Corrupted: checksums differ.
        """
        first, second = (np.asarray(checksum) for checksum in sums)
        if (first != second).any():
            devices, arrays = np.unique(np.nonzero(first != second)[0]), np.unique(np.nonzero(first != second)[1])
            raise Corrupted(
                f"step {step} was computed twice from the same state and batch, and the results differ",
                where=f"on {self._devices(devices)}; {self._arrays(arrays)}",
                hint=self._hint(step),
            )
        odd = {i: ids for i, groups in enumerate(self._groups) if (ids := odd_ones(second[:, i], groups))}
        if odd:
            raise Corrupted(
                f"copies of the state differ between devices after step {step}",
                where=f"on {self._devices(sorted({device for ids in odd.values() for device in ids}))}; {self._arrays(list(odd))}",
                hint=self._hint(step),
            )

    def _hint(self, step: int) -> str:
        before = step - self.every
        good = "this was the first comparison"
        if before > 0:
            good = f"checkpoints up to step {before}, where both were compared last, are good"
        return f"nothing was saved of this; {good}. Take the machine out and resume from one before it"

    def _devices(self, numbers: Sequence[int] | np.ndarray) -> str:
        if len(numbers) == self.mesh.size > 1:
            return f"all of {plural(self.mesh.size, 'device')}, since sums over devices spread an error"
        devices = [self.mesh.devices.flat[number] for number in numbers]
        return some((f"{device} of process {device.process_index}" for device in devices), 8)

    def _arrays(self, numbers: Sequence[int] | np.ndarray) -> str:
        return some((self.names[number] for number in numbers), 3)

    def _moving(self, state: Any) -> dict[str, Any]:
        """Returns the parts of a state that a step changes. The random key is not among them."""
        rest = {a: leaf for a, leaf in state.rest.items() if a not in self.base}
        names = ("step", "params", "optimizer", "guard", "ema")
        return {name: getattr(state, name) for name in names} | {"rest": rest}
