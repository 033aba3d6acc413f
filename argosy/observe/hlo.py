"""What a compiled program costs each device: FLOPs, temporary memory, and bytes moved by collectives. Read from XLA's analysis
and from the text of the optimized program; nothing runs.
"""

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
CALL = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")


@dataclass(frozen=True)
class Cost:
    """The cost of one program on one device. collectives: result bytes of each kind of collective, a loop's body counted once."""

    flops: float
    temporary_bytes: int
    argument_bytes: int
    collectives: Mapping[str, int] = field(default_factory=dict)

    @property
    def collective_bytes(self) -> int:
        return sum(self.collectives.values())


def cost(compiled: Any) -> Cost:
    """The cost of a program from `jit(f).lower(...).compile()`.

    XLA counts the body of a loop once, so only compare programs with the same loops.
    """
    analysis, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    moved = collective_bytes(compiled.as_text())
    return Cost(analysis.get("flops", 0.0), memory.temp_size_in_bytes, memory.argument_size_in_bytes, moved)


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective in an optimized HLO module, between different devices."""
    moved: Counter[str] = Counter()
    for line in text.splitlines():
        if (found := CALL.search(line)) and not ALONE.search(line):
            shapes, kind = found.groups()
            parts = SHAPE.findall(shapes)
            moved[kind] += sum(SIZES.get(t, 4) * _elements(dims) for t, dims in parts)
    return dict(moved)


def _elements(dims: str) -> int:
    n = 1
    for d in filter(None, dims.split(",")):
        n *= int(d)
    return n
