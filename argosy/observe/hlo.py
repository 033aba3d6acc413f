"""What a compiled program costs each device: FLOPs, temporary memory, and bytes moved by collectives. Read from XLA's analysis
and from the text of the optimized program; nothing runs.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
SIZES |= {"f64": 8, "s64": 8, "u64": 8}
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
# Groups of one device each: nothing moves, and XLA on CPUs leaves such a call in the program.
ALONE = re.compile(r"replica_groups=(\{(\{\d+\},?)+\}|\[\d+,1\]<=)")
# The same by axes of a mesh: mesh['a'=1,'b'=4] {'a'}, with the order of its devices before the last part where that is another.
BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\S*\))? \{([^}]*)\}")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(\w+)=(%[\w.-]+|\{%[^}]*\})")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
RESULT = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = \w+\[([\d,]*)\]")
PRODUCT = re.compile(r"= \w+\[([\d,]*)\]\S* dot\(%([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}")
CALL = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")


@dataclass(frozen=True)
class Cost:
    """The cost of one program on one device.

    flops, collectives: as XLA counts them, and result bytes of each kind of collective; a loop's body counts once.
    products, moved: FLOPs of matrix products, and result bytes of each kind of collective; a loop's body counts as often as it runs,
        where XLA knows how often.
    """

    flops: float
    temporary_bytes: int
    argument_bytes: int
    collectives: Mapping[str, int] = field(default_factory=dict)
    products: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)

    @property
    def collective_bytes(self) -> int:
        return sum(self.collectives.values())


def cost(compiled: Any) -> Cost:
    """The cost of a program from `jit(f).lower(...).compile()`.

    XLA counts the body of a loop once, so only compare its FLOPs of programs with the same loops.
    """
    analysis, memory, text = compiled.cost_analysis() or {}, compiled.memory_analysis(), compiled.as_text()
    flops, temporary, arguments = analysis.get("flops", 0.0), memory.temp_size_in_bytes, memory.argument_size_in_bytes
    return Cost(flops, temporary, arguments, collective_bytes(text), product_flops(text), collective_bytes(text, repeated=True))


def collective_bytes(text: str, repeated: bool = False) -> dict[str, int]:
    """Bytes of the results of each kind of collective in an optimized HLO module.

    Args:
        repeated: counts the body of a loop as often as it runs.
    """
    moved: Counter[str] = Counter()
    for lines, times in computations(text):
        for line in lines:
            if (found := CALL.search(line)) and not _is_alone(line):
                shapes, kind = found.groups()
                size = sum(SIZES.get(t, 4) * _elements(dims) for t, dims in SHAPE.findall(shapes))
                moved[kind] += size * (times if repeated else 1)
    return dict(moved)


def _is_alone(line: str) -> bool:
    """Whether the groups of a collective have one device each."""
    if found := BY_AXES.search(line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return all(sizes.get(axis.strip("'")) == "1" for axis in found[2].split(","))
    return ALONE.search(line) is not None


def product_flops(text: str) -> int:
    """FLOPs of the matrix products of an optimized HLO module; the body of a loop counts as often as it runs."""
    total = 0
    for lines, times in computations(text):
        shapes = {found[1]: found[2] for line in lines if (found := RESULT.match(line))}
        for line in lines:
            if not (found := PRODUCT.search(line)):
                continue
            result, left, contracted = found.groups()
            sizes = [int(d) for d in shapes[left].split(",") if d]
            inner = math.prod(sizes[int(i)] for i in contracted.split(",") if i)
            total += 2 * _elements(result) * inner * times
    return total


def computations(text: str) -> list[tuple[list[str], int]]:
    """The computations of an HLO module, each with how often it runs. A loop whose repeats XLA does not know counts once, and so does
    every branch of a conditional."""
    bodies: dict[str, list[str]] = {}
    main, lines = "", list[str]()
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            lines = bodies[found[2]] = []
            main = found[2] if found[1] else main
        else:
            lines.append(line)
    times: Counter[str] = Counter({main: 1})
    # HLO writes a computation before those that call it.
    for name in reversed(bodies):
        for line in bodies[name]:
            known = TRIPS.search(line)
            for how, called in CALLED.findall(line):
                for one in re.findall(r"%([\w.-]+)", called):
                    times[one] += times[name] * (int(known[1]) if known and how == "body" else 1)
    return [(lines, times[name]) for name, lines in bodies.items()]


def _elements(dims: str) -> int:
    n = 1
    for d in filter(None, dims.split(",")):
        n *= int(d)
    return n
