"""What an optimized program does, in tables: operations by kind and by layer, its biggest values, its collectives; and how two differ.

Operations are those that run as one: a fusion is one operation, with the bytes that enter and leave it. The body of a loop counts as
often as it runs. The biggest values are results of operations; where XLA puts them, and which share memory, its text does not say.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.text import Computation, type_bytes
from argosy.observe.profile.table import Operation, layer_of, operations

# Names for values, of which none is computed or moved.
NAMES = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all", "opt-barrier")


@dataclass(frozen=True)
class OperationTotals:
    """Some operations of a program.

    count: executions.
    flops: of their products.
    bytes: of their operands and results.
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

    type: as XLA writes it, without its layout.
    times: how often it is computed.
    """

    name: str
    bytes: int
    type: str
    kind: str
    layer: str
    times: int


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind, size and place.

    count: executions.
    bytes: results on a device, of all executions.
    devices: that take part together.
    asynchronous: how many executions run beside other work.
    """

    kind: str
    layer: str
    devices: int
    count: int
    bytes: int
    asynchronous: int


@dataclass(frozen=True)
class ProgramSummary:
    """A program in tables.

    argument_bytes: its parameters.
    unknown_loops: loops of unknown length, whose bodies count once.
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
    """The tables of a program."""
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
    """Computations whose operations are parts of one: those of fusions and of reductions."""
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
    """A row that two programs have differently; None: it is not there."""

    table: str
    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def bytes(self) -> int:
        """How many bytes more the second moves or holds."""
        return int((self.after or {}).get("bytes", 0)) - int((self.before or {}).get("bytes", 0))


def program_differences(a: ProgramSummary, b: ProgramSummary, values: int = 20) -> list[Difference]:
    """The rows in which two programs differ, those with the most bytes first.

    Args:
        values: how many of the biggest values of each are compared, by type and layer: their names are numbered anew in each program.
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

