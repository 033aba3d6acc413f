"""A static estimate of the time that a compiled program takes: its instructions priced one by one along the schedule, loops counted as
often as they run, and collectives only where no other work runs beside them.

TPUs: the compiler's own cycles of each instruction. Kernels have none, and take their FLOPs over a share of the peak, as measured for
attention and grouped products. Elsewhere an instruction takes its FLOPs over the peak or its bytes over the bandwidth, whichever is
more. XLA's `optimal_seconds` counts loops once and can be negative, so it is never read.

The estimate is static: it ranks programs. Against published times of whole models it is 7 to 12 % slow, and against measured single
operations 8 to 24 % fast.
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
# Cycles above this are a negative number that was written without its sign.
MOST_CYCLES = 10**15
# The share of the peak that kernels of attention reach, and half of the products of causal attention are skipped.
ATTENTION, CAUSAL = 0.55, 0.5
# The share of the peak that grouped products reach (93 % measured on TPU v5e for the best blocks).
GROUPED = 0.8
# The scope of a grouped product that computes so many percent of its rows, as whoever wrote it knows: kernels skip rows of no group.
FILLED = "filled_percent_"
# Instructions that move nothing.
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "reshape", "iota",
    "while", "conditional", "call", "copy-start", "copy-done", "async-start", "async-done", "async-update",
)  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """What work costs on a device.

    flops_per_s: for products, as they are reached.
    bytes_per_s: of the memory.
    clock_hz: cycles a second, where the compiler states cycles; 0: it states none.
    peak_flops_per_s: the peak, of which kernels reach a share.
    ring_bytes_per_s: bytes a second that a device receives in a ring along one axis of the mesh.
    rings: rings that a collective over all devices may use at once.
    read_bytes_per_s: of weights that are read and not written; 0: `bytes_per_s`.
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
    """A collective with its time, each time it runs, and the part of it beside which nothing else runs."""

    collective: Collective
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Estimate:
    """The time of a program.

    compute_seconds: all instructions that are no collectives; `by_kind` splits it.
    communication_seconds, exposed_seconds: all collectives, and their part beside which nothing else runs.
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
    """The time of a program on devices with these prices.

    Args:
        kernels: seconds of one call, and the kind of work, of kernels whose time depends on data; by how their names begin.
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
    """The time of a collective in rings: what a device receives, over the bandwidth of the rings that it may use."""
    size, rings = collective.size, prices.rings if collective.size > math.sqrt(max(devices, 1)) else 1
    share, speed = (size - 1) / max(size, 1), prices.ring_bytes_per_s * rings
    if collective.kind == "all-gather":
        return collective.bytes * share / speed
    if collective.kind == "reduce-scatter":
        return collective.bytes * (size - 1) / speed
    if collective.kind == "all-reduce":
        return 2 * collective.bytes * share / speed
    if "all-to-all" in collective.kind:
        # On a ring a part travels a quarter of the way, in both directions.
        return collective.bytes * max(share, 0.25 * size * share / max(rings, 1) ** 2 if prices.rings > 1 else share) / speed
    return collective.bytes / (prices.ring_bytes_per_s / 2)


def _inside(module: HloModule) -> set[str]:
    """Computations that run as parts of one instruction: fused ones, and those of reductions and sorts."""
    apart = ("body", "condition", "branch_computations", "true_computation", "false_computation")
    names = set[str]()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ("call", "async-start"):
                continue
            names |= {name for attribute, name in instruction.called() if attribute not in apart}
    return names


def _seconds(module: HloModule, computation: Computation, instruction: Instruction, prices: Prices) -> tuple[float, str]:
    """The time of an instruction, and the kind of work it is."""
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
    """Bytes that an instruction reads and writes. What it updates in place counts as what is written there."""
    sizes = [computation.by_name[name].bytes for name in instruction.operands if name in computation.by_name]
    if "dynamic-update-slice" in instruction.name or "dynamic_update_slice" in instruction.name:
        return 2 * (sum(sizes) - max(sizes, default=0))
    if "dynamic-slice" in instruction.name or instruction.opcode in ("gather", "slice"):
        return 2 * instruction.bytes
    return sum(sizes) + instruction.bytes
