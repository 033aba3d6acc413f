"""Measures the implementations of an op on this device: a forward and a backward pass, in pairs with the default implementation.

    measurements = measure(ATTENTION, case, seconds=1.0, memory=2**33)
    winner(measurements)                      the fastest implementation that is clearly faster than the default, or None

Compilation is not measured. Times are measured in pairs, because other work on the machine slows both runs of a pair alike. Each result
is compared with that of the op's reference in float32, and an implementation with a wrong result cannot win.
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

# The least ratio of the default's time to a winner's, and the least share of pairs in which a winner must be faster.
LEAST, MOSTLY = 1.05, 0.75
PAIRS = (5, 100)
# The largest relative difference from the reference that rounding explains, for sums over thousands of numbers.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
# The share of the device's memory that the reference may take.
SHARE = 0.2


@dataclass
class Measurement:
    """The measurement of an implementation on one case.

    implementation: the name of the implementation, with a block size after a colon if it is not the default size.
    default: whether the op chooses this implementation without tuning.
    seconds: the median time of a forward and a backward pass. None: it did not run.
    ratio: the median, over pairs, of the default's time divided by this implementation's time.
    faster: the share of pairs in which it was faster than the default.
    error: the relative difference from the reference, the largest of output and gradients.
    reason: why the implementation did not run or cannot win. "" if neither.
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
        """Whether the implementation is correct and clearly faster than the default."""
        return not self.default and not self.reason and (self.ratio or 0.0) >= LEAST and self.faster >= MOSTLY


def measure(op: Op, case: Case, seconds: float, memory: int | None = None) -> list[Measurement]:
    """Measures all implementations that do not refuse the case, the default first.

    The fastest one that may win is measured again, because the best of many measurements may be so by chance.

    Args:
        seconds: the time for the pairs of each implementation. At least five pairs run.
        memory: the device's memory in bytes. The case is cut to as many rows as the reference has memory for. None: it is not cut.
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
            # Whatever error a compiler or a kernel raises, the other implementations are measured.
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
    """Returns the names of the implementations that do not refuse the case, the default first, each also with its other block sizes."""
    arguments = case.described(tuple(inputs), more)
    accepted = [name for name in op if op[name].refuses(*arguments) is None]
    default = next(name for name in op.preferred if name in accepted)
    names = [default, *(name for name in accepted if name != default)]
    return [candidate for name in names for candidate in (name, *(f"{name}:{size}" for size in op[name].blocks(*arguments)))]


def winner(measurements: Sequence[Measurement]) -> Measurement | None:
    """Returns the fastest implementation that is clearly faster than the default. None: there is none."""
    winners = (measurement for measurement in measurements if measurement.wins)
    return max(winners, key=lambda measurement: measurement.ratio or 0.0, default=None)


def difference(arrays: Sequence[Any], expected: Sequence[Any]) -> float:
    """Returns the largest relative difference of an array from the expected one, |a - b| / |b| by norms."""

    def relative(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float32).tiny))

    return max(map(relative, arrays, expected))


def _program(op: Op, name: str, case: Case, inputs: Sequence[Any], more: dict[str, Any]) -> Callable[[], Any]:
    """Compiles a forward and a backward pass. Returns a function without arguments that returns the output and the gradients."""
    implementation = op[name]

    def passes(inputs: tuple[Any, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        y, back = jax.vjp(lambda *a: case.call(implementation, a, more), *inputs)
        # A gradient that differs for each number of the output, as that of a loss does.
        return y, *back(jnp.cos(y))

    compiled = jax.jit(passes).lower(tuple(inputs), more).compile()
    return lambda: jax.block_until_ready(compiled(tuple(inputs), more))


def _time(measurement: Measurement, default: Callable[[], Any], candidate: Callable[[], Any], seconds: float) -> None:
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < PAIRS[0] or (time.perf_counter() < end and len(pairs) < PAIRS[1]):
        # The order alternates, because the first of a pair may find the processor's caches filled by the other.
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
