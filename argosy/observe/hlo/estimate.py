"""Estimates the time of a compiled program without running it. The times of all instructions are added along the schedule, with loops
as often as they run. A collective counts only as far as no other work overlaps with it.

On TPUs, the compiler states the cycles of each instruction. Kernels have no cycles: they take their FLOPs over a share of the peak,
which was measured for attention and grouped products. On other platforms an instruction takes the larger of FLOPs over peak and bytes
over bandwidth. XLA's `optimal_seconds` is not used, because it counts loops once and can be negative.

The estimate is good enough to rank programs. It is 7 to 12 % above published times of whole models, and 8 to 24 % below measured times
of single operations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from argosy.observe.hlo.collectives import Collective, collectives
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.products import call_target, flops, kernel_name
from argosy.observe.hlo.text import Computation, Instruction

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Cycles above this are negative numbers that were written as unsigned.
MOST_CYCLES = 10**15
# The share of the peak that attention kernels reach, and the share of the products that causal attention computes.
ATTENTION, CAUSAL = 0.55, 0.5
# The share of the peak that grouped products reach (93 % measured on TPU v5e for the best blocks).
GROUPED = 0.8
# The prefix of the scope of a grouped product that computes only this percentage of its rows, because kernels skip rows without a
# group. The author of such a product sets the scope.
FILLED = "filled_percent_"
# Instructions that take no time.
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "reshape", "iota",
    "while", "conditional", "call", "copy-start", "copy-done", "async-start", "async-done", "async-update",
)  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """The speeds of a device, from which times are computed.

    flops_per_s: the FLOPs per second that matrix products reach.
    bytes_per_s: the bandwidth of the memory.
    ring_bytes_per_s: the bytes per second that a device receives in a ring along one mesh axis.
    clock_hz: the clock frequency; 0 if the compiler states no cycles.
    peak_flops_per_s: the peak, of which kernels reach a share. 0 stands for `flops_per_s`.
    rings: the number of rings that a collective over all devices may use at once.
    read_bytes_per_s: the bandwidth for weights that are only read. 0 stands for `bytes_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    ring_bytes_per_s: float
    clock_hz: float = 0.0
    peak_flops_per_s: float = 0.0
    rings: int = 1
    read_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class CollectiveTime:
    """A collective with the time of one execution, and the part of that time in which no other work runs."""

    collective: Collective
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a program.

    compute_seconds: the time of all instructions other than collectives.
    communication_seconds: the time of all collectives.
    exposed_seconds: the part of that time in which no other work runs.
    collectives: the time of each collective.
    by_kind: `compute_seconds` by kind of work.
    """

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    collectives: Sequence[CollectiveTime] = ()
    by_kind: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def price_program(
    module: HloModule, prices: Prices, devices: int = 1, kernels: Mapping[str, tuple[float, str]] = MappingProxyType({})
) -> Estimate:
    """Estimates the time of a program on devices of these speeds.

    Args:
        devices: the number of devices of the program.
        kernels: (seconds of one call, kind of work) for kernels whose time depends on data, by the prefix of their names.
    """
    waiting = {(collective.computation, collective.start): collective for collective in collectives(module, devices)}
    inside = _inside(module)
    kinds: defaultdict[str, float] = defaultdict(float)
    timed: list[CollectiveTime] = []
    compute = communication = exposed = 0.0
    for computation, times in module.running():
        if computation.name in inside:
            continue
        running: dict[str, tuple[Collective, list[float]]] = {}
        for instruction in computation.instructions:
            costs = [cost for name, cost in kernels.items() if kernel_name(instruction).startswith(name)] if kernels else []
            seconds, kind = costs[0] if costs else _seconds(module, computation, instruction, prices)
            if (collective := waiting.get((computation.name, instruction.name))) is not None:
                duration = collective_seconds(collective, prices, devices)
                if collective.asynchronous and collective.end != collective.start:
                    running[collective.end] = (collective, [duration, 0.0])
                else:
                    timed.append(CollectiveTime(collective, duration, duration))
                    communication, exposed = communication + times * duration, exposed + times * duration
                continue
            if instruction.name in running:
                collective, (duration, overlap) = running.pop(instruction.name)
                exposed_seconds = max(0.0, duration - overlap)
                timed.append(CollectiveTime(collective, duration, exposed_seconds))
                communication, exposed = communication + times * duration, exposed + times * exposed_seconds
                continue
            for _, clocks in running.values():
                clocks[1] += seconds
            compute += times * seconds
            kinds[kind] += times * seconds
        for collective, (duration, _) in running.values():
            timed.append(CollectiveTime(collective, duration, 0.0))
            communication += times * duration
    by_kind = {kind: s for kind, s in sorted(kinds.items(), key=lambda item: -item[1]) if s}
    return Estimate(compute, communication, exposed, tuple(timed), by_kind)


def collective_seconds(collective: Collective, prices: Prices, devices: int) -> float:
    """Estimates the time of a collective in rings: the bytes that a device receives, over the bandwidth of the rings."""
    size, rings = collective.size, prices.rings if collective.size > math.sqrt(max(devices, 1)) else 1
    share, speed = (size - 1) / max(size, 1), prices.ring_bytes_per_s * rings
    if collective.kind == "all-gather":
        return collective.bytes * share / speed
    if collective.kind == "reduce-scatter":
        return collective.bytes * (size - 1) / speed
    if collective.kind == "all-reduce":
        return 2 * collective.bytes * share / speed
    if "all-to-all" in collective.kind:
        # On a ring, data travel a quarter of the way on average, in both directions.
        return collective.bytes * max(share, 0.25 * size * share / max(rings, 1) ** 2 if prices.rings > 1 else share) / speed
    return collective.bytes / (prices.ring_bytes_per_s / 2)


def _inside(module: HloModule) -> set[str]:
    """Returns the computations that are parts of one instruction: those of fusions, reductions and sorts."""
    apart = ("body", "condition", "branch_computations", "true_computation", "false_computation")
    names = set[str]()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ("call", "async-start"):
                continue
            names |= {name for attribute, name in instruction.called() if attribute not in apart}
    return names


def _seconds(module: HloModule, computation: Computation, instruction: Instruction, prices: Prices) -> tuple[float, str]:
    """Estimates the seconds of an instruction. Returns them with the kind of work."""
    if instruction.opcode in FREE:
        return 0.0, "free"
    if instruction.opcode == "custom-call" and (counted := flops(computation, instruction)):
        attention = re.search("splash|flash|fmha", instruction.name + call_target(instruction)) is not None
        peak = prices.peak_flops_per_s or prices.flops_per_s
        filled = re.search(rf"{FILLED}(\d+)", instruction.op_name)
        share = ATTENTION / CAUSAL if attention else GROUPED * 100 / int(filled[1]) if filled else GROUPED
        return counted / (peak * share), "attention" if attention else "products"
    kind = "products" if _has_products(module, instruction) else "memory"
    if prices.clock_hz:
        match = CYCLES.search(instruction.attributes)
        cycles = int(match[1]) if match else 0
        if 0 < cycles < MOST_CYCLES:
            return cycles / prices.clock_hz, kind
        if call_target(instruction) != "tpu_custom_call":
            return 0.0, kind
    work = _flops_of(module, computation, instruction)
    memory_seconds = _bytes_of(computation, instruction) / prices.bytes_per_s
    return max(work / prices.flops_per_s, memory_seconds), "products" if work else kind


def _has_products(module: HloModule, instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    if instruction.opcode != "fusion":
        return False
    return any(i.opcode in ("dot", "convolution") for c in _callees(module, instruction) for i in c.instructions)


def _callees(module: HloModule, instruction: Instruction) -> Iterable[Computation]:
    return [module.computations[name] for _, name in instruction.called() if name in module.computations]


def _flops_of(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    direct = flops(computation, instruction) or 0
    if instruction.opcode not in ("fusion", "custom-call"):
        return direct
    return direct + sum(_flops_of(module, c, i) for c in _callees(module, instruction) for i in c.instructions)


def _bytes_of(computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction reads and writes. Only the update counts if an array is updated in place."""
    sizes = [computation.by_name[name].bytes for name in instruction.operands if name in computation.by_name]
    if "dynamic-update-slice" in instruction.name or "dynamic_update_slice" in instruction.name:
        return 2 * (sum(sizes) - max(sizes, default=0))
    if "dynamic-slice" in instruction.name or instruction.opcode in ("gather", "slice"):
        return 2 * instruction.bytes
    return sum(sizes) + instruction.bytes
