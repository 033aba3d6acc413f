"""Summarizes an optimized program in tables (operations by kind and by layer, largest values, collectives), and compares two programs.

A fusion is one operation, with the bytes of its operands and results. The body of a loop counts as often as it runs. The largest values
are results of operations. The text of a program does not say where XLA puts them or which of them share memory.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.text import Computation, type_bytes
from argosy.observe.profile.table import Operation, layer_of, operations

# Instructions that only name values, and compute or move nothing.
NAMES = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all", "opt-barrier")


@dataclass(frozen=True)
class OperationTotals:
    """The totals of a group of operations of a program.

    name: the kind or the layer of the group.
    count: the number of executions.
    flops: the FLOPs of products.
    bytes: the bytes of operands and results.
    """

    name: str
    count: int = 0
    flops: int = 0
    bytes: int = 0

    def with_operation(self, operation: Operation, times: int) -> "OperationTotals":
        flops, n_bytes = self.flops + times * operation.flops, self.bytes + times * operation.bytes
        return replace(self, count=self.count + times, flops=flops, bytes=n_bytes)


@dataclass(frozen=True)
class Value:
    """A result of an operation.

    name: the name of the operation.
    bytes: the size of the value.
    type: the type as XLA writes it, without the layout.
    kind, layer: the kind and the layer of the operation.
    times: how often the value is computed.
    """

    name: str
    bytes: int
    type: str
    kind: str
    layer: str
    times: int


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind in one layer over the same number of devices.

    devices: the number of devices that take part together.
    count: the number of executions.
    bytes: the result bytes on a device, of all executions together.
    asynchronous: the number of executions that may overlap with other work.
    """

    kind: str
    layer: str
    devices: int
    count: int
    bytes: int
    asynchronous: int


@dataclass(frozen=True)
class ProgramSummary:
    """The tables of a program.

    argument_bytes: the bytes of the program's arguments.
    kinds, layers: the totals of operations by kind and by layer.
    values: the largest results of operations.
    transfers: the collectives.
    unknown_loops: the names of the loops whose trip count is unknown. The analysis assumes that their bodies run once.
    """

    argument_bytes: int
    kinds: list[OperationTotals]
    layers: list[OperationTotals]
    values: list[Value]
    transfers: list[Transfer]
    unknown_loops: list[str]

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.kinds)

    @property
    def bytes(self) -> int:
        return sum(work.bytes for work in self.kinds)


def summarize(program: HloModule) -> ProgramSummary:
    """Computes the tables of a program."""
    by_name = operations(program)
    inside = _inside_fusions(program)
    kinds: dict[str, OperationTotals] = {}
    layers: dict[str, OperationTotals] = {}
    values: list[Value] = []
    for computation, times in program.running():
        if computation.name in inside:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in NAMES:
                continue
            operation = by_name[instruction.name]
            for table, name in ((kinds, operation.kind), (layers, operation.layer)):
                table[name] = table.get(name, OperationTotals(name)).with_operation(operation, times)
            size = type_bytes(instruction.type)
            values.append(Value(instruction.name, size, _short(instruction.type), operation.kind, operation.layer, times))
    entry: Computation = program.computations[program.entry]
    return ProgramSummary(
        sum(type_bytes(instruction.type) for instruction in entry.instructions if instruction.opcode == "parameter"),
        sorted(kinds.values(), key=lambda work: -work.bytes),
        sorted(layers.values(), key=lambda work: -work.bytes),
        sorted(values, key=lambda value: -value.bytes),
        _transfers(program),
        list(program.unknown_loops),
    )


def _transfers(program: HloModule) -> list[Transfer]:
    transfers: dict[tuple[str, str, int], Transfer] = {}
    for collective in collectives(program):
        key = (collective.kind, layer_of(collective.op_name), collective.size)
        old = transfers.get(key, Transfer(*key, 0, 0, 0))
        n_bytes = old.bytes + collective.bytes * collective.times
        asynchronous = old.asynchronous + collective.times * collective.asynchronous
        transfers[key] = replace(old, count=old.count + collective.times, bytes=n_bytes, asynchronous=asynchronous)
    return sorted(transfers.values(), key=lambda transfer: -transfer.bytes)


def _inside_fusions(program: HloModule) -> set[str]:
    """Returns the computations that are parts of one operation: those of fusions and of reductions."""
    out: set[str] = set()
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode not in ("while", "conditional", "call", "async-start"):
                out |= {name for _, name in instruction.called()}
    return out


def _short(type_: str) -> str:
    return type_.split("{")[0] if not type_.startswith("(") else "(...)"


# ---------------------------------------------------------------- two programs


@dataclass(frozen=True)
class Difference:
    """A row of a table that differs between two programs. `before` and `after` are the row in each program, None where it is
    missing."""

    table: str
    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def bytes(self) -> int:
        """How many bytes more the second program moves or holds in this row."""
        return int((self.after or {}).get("bytes", 0)) - int((self.before or {}).get("bytes", 0))


def program_differences(a: ProgramSummary, b: ProgramSummary, values: int = 20) -> list[Difference]:
    """Returns the rows in which two programs differ. The largest differences in bytes come first.

    Args:
        values: how many of the largest values of each program are compared. They are matched by type and layer, because their names
            have new numbers in each program.
    """
    tables = {"kind": (a.kinds, b.kinds), "layer": (a.layers, b.layers)}
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        table: ({totals.name: asdict(totals) for totals in mine}, {totals.name: asdict(totals) for totals in theirs})
        for table, (mine, theirs) in tables.items()
    }
    rows["collective"] = (_named_transfers(a.transfers), _named_transfers(b.transfers))
    rows["value"] = (_typed_values(a.values[:values]), _typed_values(b.values[:values]))
    out = [
        Difference(table, name, mine.get(name), theirs.get(name))
        for table, (mine, theirs) in rows.items()
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name) != theirs.get(name)
    ]
    return sorted(out, key=lambda difference: -abs(difference.bytes))


def _named_transfers(transfers: Sequence[Transfer]) -> dict[str, Any]:
    return {f"{transfer.kind} over {transfer.devices}, {transfer.layer}": asdict(transfer) for transfer in transfers}


def _typed_values(values: Sequence[Value]) -> dict[str, Any]:
    rows: dict[str, dict[str, int]] = defaultdict(lambda: {"count": 0, "bytes": 0})
    for value in values:
        row = rows[f"{value.type} {value.layer}"]
        row["count"] += 1
        row["bytes"] += value.bytes
    return dict(rows)

