"""Finds the collectives of an HLO module: kind, bytes, groups of devices, mesh axes, and whether they overlap with other work.

On TPUs an asynchronous collective is a fusion that starts it, fusions of other work that contain its steps, and a fusion that ends it.
Each of them contains a copy of the collective, of which one counts. An all-reduce in a fusion called `all-reduce-scatter`, of whose
result each device keeps its share, counts as a reduce-scatter.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.text import Computation, Instruction, tuple_elements, type_bytes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
STARTS = {f"{kind}-start": kind for kind in KINDS}
SCATTERS = "all-reduce-scatter"
# The custom calls that use a copy of an asynchronous collective in fusions of TPUs.
BEGIN, END = "AsyncCollectiveStart", "AsyncCollectiveDone"
STEPS = "async_collective_fusion"

AXES = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    kind: the kind, such as "all-gather".
    bytes: the bytes of the result on a device, for one execution.
    times: the number of executions.
    groups: the devices that take part together, [groups, devices]. For a permute these are pairs of source and target.
    asynchronous: whether different instructions start and end the collective.
    computation: the name of the computation that contains it.
    start, end: the names of the instructions that start and end it, the same one if it is synchronous.
    op_name: JAX's name of the operation.
    """

    kind: str
    bytes: int
    times: int
    groups: np.ndarray
    asynchronous: bool
    computation: str
    start: str
    end: str
    op_name: str = ""

    @property
    def size(self) -> int:
        """The number of devices that take part together."""
        return int(self.groups.shape[-1]) if self.groups.size else 1

    @cached_property
    def alone(self) -> bool:
        """Whether nothing is moved, because every group has one device, or every source is its own target."""
        return self.size == 1 if self.kind != "collective-permute" else not bool((self.groups[:, 0] != self.groups[:, 1]).any())

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes along which the groups lie; () if the groups do not fit the mesh. `mesh`: the sizes of the axes."""
        names = [name for name, size in mesh.items() if size > 1]
        sizes = tuple(mesh[name] for name in names)
        count = int(np.prod(sizes)) if sizes else 1
        if not self.groups.size or not names or int(self.groups.max()) >= count:
            return ()
        places = np.stack(np.unravel_index(self.groups, sizes), axis=-1)
        differ = (places != places[:, :1]).any(axis=(0, 1))
        return tuple(name for name, moves in zip(names, differ, strict=True) if moves)


def collectives(program: HloModule, devices: int = 1) -> list[Collective]:
    """Returns every collective of a program that moves data, in the order of the text.

    Args:
        devices: the number of devices of the program, for collectives over all of them.
    """
    candidates = list(_candidates(program, devices))
    return [collective for collective in candidates if not collective.alone]


def bytes_by_kind(all_: Sequence[Collective], repeated: bool = True) -> dict[str, int]:
    """Returns the result bytes of each kind of collective.

    Args:
        repeated: whether the body of a loop counts as often as it runs, and not once.
    """
    totals: Counter[str] = Counter()
    for collective in all_:
        totals[collective.kind] += collective.bytes * (collective.times if repeated else 1)
    return dict(totals)


def _candidates(program: HloModule, devices: int) -> Iterator[Collective]:
    fused = {called for c in program.computations.values() for i in c.instructions if i.opcode == "fusion" for _, called in i.called()}
    for computation, times in program.running():
        if computation.name in fused:
            continue
        for instruction in computation.instructions:
            yield from _collectives_of(program, computation, times, instruction, devices)


def _collectives_of(
    program: HloModule, computation: Computation, times: int, instruction: Instruction, devices: int
) -> Iterator[Collective]:
    """Yields the collectives that an instruction is, starts or contains."""
    opcode = instruction.opcode

    def make(kind: str, size: int, of: Instruction, end: str | None) -> Collective:
        last = instruction.name if end is None else end
        groups = _groups(of, devices)
        return Collective(kind, size, times, groups, end is not None, computation.name, instruction.name, last, of.op_name)

    if opcode in KINDS:
        yield make(opcode, instruction.bytes, instruction, None)
    elif opcode in STARTS:
        end = _end_of(computation, instruction)
        yield make(STARTS[opcode], end.bytes if end else _result(instruction), instruction, end.name if end else instruction.name)
    elif opcode in ("async-start", "fusion"):
        for inner in _inside(program, instruction):
            collective = next((i for i in inner.instructions if i.opcode in KINDS), None)
            if collective is None:
                continue
            if opcode == "async-start":
                end = _end_of(computation, instruction)
                yield make(collective.opcode, collective.bytes, collective, end.name if end else instruction.name)
            elif inner.name.startswith(SCATTERS) and collective.opcode == "all-reduce":
                yield make("reduce-scatter", instruction.bytes, collective, None)
            else:
                yield from _fused_collectives(program, computation, instruction, inner, make)


def _inside(program: HloModule, instruction: Instruction) -> Iterator[Computation]:
    for attribute, name in instruction.called():
        if attribute == "calls" and name in program.computations:
            yield program.computations[name]


def _fused_collectives(
    program: HloModule, computation: Computation, instruction: Instruction, inner: Computation, make: Callable[..., Collective]
) -> Iterator[Collective]:
    """Yields the collectives that a fusion starts or contains completely. Copies in fusions that continue or end them do not count."""
    begun = [inner.by_name.get(i.operands[0]) for i in inner.instructions if BEGIN in i.attributes and i.operands]
    asynchronous = inner.name.startswith(STEPS) or any(BEGIN in i.attributes or END in i.attributes for i in inner.instructions)
    for collective in inner.instructions:
        if collective.opcode not in KINDS:
            continue
        if not asynchronous:
            yield make(collective.opcode, collective.bytes, collective, None)
        elif collective in begun:
            end = _chain_end(program, computation, instruction, collective)
            yield make(collective.opcode, collective.bytes, collective, end or instruction.name)


def _chain(instruction: Instruction) -> tuple[str, str]:
    match = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return instruction.attribute("channel_id") or "", match[1] if match else ""


def _chain_end(program: HloModule, computation: Computation, start: Instruction, collective: Instruction) -> str | None:
    """Returns the name of the fusion after `start` that ends the collective."""
    after = computation.instructions[computation.instructions.index(start) + 1 :]
    for instruction in after:
        if instruction.opcode != "fusion":
            continue
        for inner in _inside(program, instruction):
            if any(END in i.attributes for i in inner.instructions):
                ended = [i for i in inner.instructions if i.opcode in KINDS]
                if any(_chain(i) == _chain(collective) for i in ended):
                    return instruction.name
    return None


def _end_of(computation: Computation, start: Instruction) -> Instruction | None:
    """Returns the instruction that ends the operation of `start`, possibly after update instructions."""
    name = start.name
    for instruction in computation.instructions:
        if name in instruction.operands:
            if instruction.opcode.endswith("-done"):
                return instruction
            if instruction.opcode.endswith("-update"):
                name = instruction.name
    return None


def _result(start: Instruction) -> int:
    """Returns the bytes of the result of a start instruction, whose type is a tuple (operand, result, ...)."""
    elements = tuple_elements(start.type)
    return type_bytes(elements[1] if len(elements) > 1 and start.opcode != "all-reduce-start" else start.type)


def _groups(instruction: Instruction, devices: int) -> np.ndarray:
    """Returns the groups of devices of a collective, [groups, devices]."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
    if pairs is not None:
        return np.asarray([int(n) for n in re.findall(r"\d+", pairs[1])], np.int64).reshape(-1, 2)
    start = instruction.attributes.find("replica_groups=")
    text = instruction.attributes[start + len("replica_groups=") :] if start >= 0 else ""
    if match := AXES.match(text):
        return _by_axes(match[1], match[2], match[3])
    if match := IOTA.match(text):
        return _iota(match[1], match[2], match[3])
    listed = re.match(r"\{((?:\{[\d,]*\},?)+)\}", text)
    if listed is None:
        return np.arange(max(devices, 1))[None]
    groups = [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    most = max(map(len, groups))
    # Groups of different sizes do not occur in SPMD programs. A shorter group would be filled up with its first device.
    return np.asarray([group + group[:1] * (most - len(group)) for group in groups], np.int64)


def _iota(shape: str, sizes: str, order: str | None) -> np.ndarray:
    """Expands XLA's short form of groups, such as [4,2]<=[2,4]T(1,0)."""
    dims = [int(n) for n in sizes.split(",")]
    numbers = np.arange(int(np.prod(dims))).reshape(dims)
    if order:
        numbers = numbers.transpose([int(n) for n in order.split(",")])
    return numbers.reshape([int(n) for n in shape.split(",")])


def _by_axes(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """Expands groups along mesh axes, such as mesh['a'=2,'b'=4] {'b'}. In {'a':(2)2}, the sub-axis of `a` has size 2 and follows a
    sub-axis of size 2."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
    count = int(np.prod(list(sizes.values())))
    order = np.arange(count)
    if ids:
        match = IOTA.match(ids)
        order = _iota(match[1], match[2], match[3]).reshape(-1) if match else _simple_order(ids, count)
    sub_axes = [(name, int(before or 1), int(size or 0)) for name, before, size in SUB_AXIS.findall(axes)]
    split: list[tuple[str, int, bool]] = []
    for name, size in sizes.items():
        pieces = sorted((before, part or size) for n, before, part in sub_axes if n == name)
        at = 1
        for before, part in pieces:
            if before > at:
                split.append((name, before // at, False))
            split.append((name, part, True))
            at = before * part
        if at < size:
            split.append((name, size // at, False))
    grid = order.reshape([size for _, size, _ in split] or [1])
    inside = [n for n, (_, _, member) in enumerate(split) if member]
    outside = [n for n in range(len(split)) if n not in inside]
    members = int(np.prod([split[n][1] for n in inside])) if inside else 1
    return grid.transpose(outside + inside).reshape(-1, members) if split else grid.reshape(-1, 1)


def _simple_order(ids: str, count: int) -> np.ndarray:
    """Expands an order of devices such as `[2,4]T(1,0)`: an iota of this shape, transposed."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
    if match is None:
        return np.arange(count)
    return _iota(str(count), match[1], match[2]).reshape(-1)
