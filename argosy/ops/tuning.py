"""Measures the implementations of an op on this device: forward and backward, compiled before, in pairs with the default.

    measurements = measure(ATTENTION, case, seconds=1.0, memory=2**33)
    winner(measurements)                      the fastest that is worth a choice, or None

Pairs, because other work on the machine slows both of a pair alike. The result of each is compared with that of the op's reference
in float32: an implementation that is wrong wins nothing.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.ops.op import Case, Op
from argosy.ops.precision import wide

# The least ratio of times for which a winner is kept, and the share of pairs in which it must be faster.
LEAST, MOSTLY = 1.05, 0.75
PAIRS = (5, 100)
# The relative difference from the reference that rounding explains, for sums over thousands of numbers.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
# The share of the memory that the reference may take.
SHARE = 0.2


@dataclass
class Measurement:
    """An implementation on one case.

    implementation: its name, with the size of its blocks after a colon.
    default: whether it is what the op takes by itself.
    seconds: median time of a forward and a backward pass; None if it did not run.
    ratio: median, over pairs, of the default's time by its own.
    faster: the share of pairs in which it was faster than the default.
    error: relative difference from the reference, the largest of output and gradients.
    reason: why it did not run, or cannot win; "" otherwise.
    """

    implementation: str
    default: bool
    seconds: float | None = None
    ratio: float | None = None
    faster: float = 0.0
    error: float | None = None
    reason: str = ""

    @property
    def wins(self) -> bool:
        """Whether it is worth a choice: faster than the default, and right."""
        return not self.default and not self.reason and (self.ratio or 0.0) >= LEAST and self.faster >= MOSTLY


def measure(op: Op, case: Case, seconds: float, memory: int | None = None) -> list[Measurement]:
    """All implementations that do not refuse the case, the default first. The fastest that may win is measured again, so that it does
    not win by the luck of being one of many.

    Args:
        seconds: time for the pairs of each implementation; at least five pairs run.
        memory: of the device. The case is cut to as many rows as the reference has memory for.
    """
    if memory is not None:
        case = case.cut(max(1, min(case.rows, int(SHARE * memory / max(case.reference_bytes, 1)))))
    inputs, more = case.arguments()
    names = candidates(op, case, inputs, more)
    if memory is not None and case.reference_bytes > SHARE * memory:
        reason = "the reference, which it is compared with, has no memory"
        return [Measurement(name, i == 0, reason=reason) for i, name in enumerate(names)]
    exact = tuple(wide(a) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in inputs)
    with jax.default_matmul_precision("highest"):
        expected = _program(op, op.default, case, exact, more)()
    measurements = [Measurement(name, i == 0) for i, name in enumerate(names)]
    programs: dict[str, Callable[[], Any]] = {}
    for measurement in measurements:
        try:
            program = _program(op, measurement.implementation, case, inputs, more)
            measurement.error = difference(program(), expected)
            programs[measurement.implementation] = program
        except Exception as error:
            # Whatever a compiler or a kernel says: the others are measured.
            measurement.reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}"
    default = measurements[0]
    if default.implementation not in programs:
        return measurements
    tolerance = max(TOLERANCES.get(inputs[0].dtype.name, 0.0), default.error or 0.0)
    for measurement in measurements:
        if measurement.implementation not in programs:
            continue
        _time(measurement, programs[default.implementation], programs[measurement.implementation], seconds)
        if measurement.error is None or not measurement.error <= tolerance:
            measurement.reason = "wrong: its result differs from the reference's"
            measurement.error = measurement.error if measurement.error is not None and math.isfinite(measurement.error) else None
    if (first := winner(measurements)) is not None:
        _time(first, programs[default.implementation], programs[first.implementation], seconds)
    return measurements


def candidates(op: Op, case: Case, inputs: Sequence[Any], more: dict[str, Any]) -> list[str]:
    """Names of the implementations that do not refuse the case, the default first, each also with the other sizes of its blocks."""
    arguments = case.described(tuple(inputs), more)
    accepted = [name for name in op if op[name].refuses(*arguments) is None]
    default = next(name for name in op.preferred if name in accepted)
    names = [default, *(name for name in accepted if name != default)]
    return [candidate for name in names for candidate in (name, *(f"{name}:{size}" for size in op[name].blocks(*arguments)))]


def winner(measurements: Sequence[Measurement]) -> Measurement | None:
    """The fastest that is worth a choice; None if the default is as good."""
    winners = (measurement for measurement in measurements if measurement.wins)
    return max(winners, key=lambda measurement: measurement.ratio or 0.0, default=None)


def difference(arrays: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative difference, by the norms of the arrays."""

    def relative(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float32).tiny))

    return max(map(relative, arrays, expected))


def _program(op: Op, name: str, case: Case, inputs: Sequence[Any], more: dict[str, Any]) -> Callable[[], Any]:
    """A compiled pass forward and backward: () -> output and gradients."""
    implementation = op[name]

    def passes(inputs: tuple[Any, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        y, back = jax.vjp(lambda *a: case.call(implementation, a, more), *inputs)
        # As the gradient of a loss, another for each number of the output.
        return y, *back(jnp.cos(y))

    compiled = jax.jit(passes).lower(tuple(inputs), more).compile()
    return lambda: jax.block_until_ready(compiled(tuple(inputs), more))


def _time(measurement: Measurement, default: Callable[[], Any], candidate: Callable[[], Any], seconds: float) -> None:
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < PAIRS[0] or (time.perf_counter() < end and len(pairs) < PAIRS[1]):
        # Which is first alternates: the first may find caches of the processor filled by the other.
        order = (default, candidate) if len(pairs) % 2 == 0 else (candidate, default)
        times = {call: _elapsed(call) for call in order}
        pairs.append((times[default], times[candidate]))
    measurement.seconds = statistics.median(mine for _, mine in pairs)
    measurement.ratio = 1.0 if measurement.default else statistics.median(theirs / mine for theirs, mine in pairs)
    measurement.faster = sum(mine < theirs for theirs, mine in pairs) / len(pairs)


def _elapsed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
