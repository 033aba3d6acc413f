"""Computes the cost of a compiled program on each device: FLOPs, temporary memory, and bytes moved by collectives. The cost is read
from XLA's analysis and from the text of the optimized program, for CPUs, GPUs and TPUs, without running the program.

    text           parses computations, instructions and types
    module         the module, and how often its computations run
    loops          how often a loop runs
    products       FLOPs of matrix products, convolutions and kernels
    collectives    kind, bytes, groups and mesh axes of collectives, and whether they are asynchronous
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from argosy.observe.hlo import products
from argosy.observe.hlo.collectives import bytes_by_kind, collectives
from argosy.observe.hlo.module import HloModule


@dataclass(frozen=True)
class Cost:
    """The cost of one program on one device.

    flops: the FLOPs as XLA counts them, with the body of a loop once.
    temporary_bytes, argument_bytes: the memory of temporary buffers and of arguments.
    collectives: the result bytes of each kind of collective, with the body of a loop once.
    products: the FLOPs of products, with the body of a loop as often as it runs.
    moved: the result bytes of each kind of collective, with the body of a loop as often as it runs.
    uncounted: the names of kernels whose FLOPs are unknown.
    unknown_loops: the names of the loops whose trip count is unknown. The analysis assumes that their bodies run once.
    """

    flops: float
    temporary_bytes: int
    argument_bytes: int
    collectives: Mapping[str, int] = field(default_factory=dict)
    products: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def collective_bytes(self) -> int:
        return sum(self.collectives.values())


def cost(compiled: Any) -> Cost:
    """Returns the cost of a program from `jit(f).lower(...).compile()`.

    XLA counts the body of a loop once, so `flops` can only be compared between programs with the same loops.
    """
    analysis, memory, program = compiled.cost_analysis() or {}, compiled.memory_analysis(), HloModule.read(compiled.as_text())
    transfers = collectives(program)
    return Cost(
        flops=analysis.get("flops", 0.0),
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        collectives=bytes_by_kind(transfers, repeated=False),
        products=products.product_flops(program),
        moved=bytes_by_kind(transfers),
        uncounted=tuple(products.uncounted_kernels(program)),
        unknown_loops=tuple(program.unknown_loops),
    )


def collective_bytes(text: str, repeated: bool = False) -> dict[str, int]:
    """Returns the result bytes of each kind of collective in an optimized HLO module.

    Args:
        text: the text of the module.
        repeated: whether the body of a loop counts as often as it runs, and not once.
    """
    return bytes_by_kind(collectives(HloModule.read(text)), repeated)
