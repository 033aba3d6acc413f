"""Tables of a capture: seconds by layer, kind and operation, with the FLOPs and bytes of the compiled program.

Rows add up to the wall time of the capture. Time without any operation belongs to the host. The part of it in which the loop waited for
data, as the loop's own clock measured, is a row of its own.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from argosy.observe.hlo import products
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.text import Computation, Instruction, type_bytes
from argosy.observe.profile.capture import Window
from argosy.observe.profile.trace import Trace, is_container

DATA, HOST, OTHERS = "waiting for data", "host, idle", "other programs"
PASSES = (("transpose(", "backward"), ("rematted_computation", "recomputed"))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective", "send", "recv")
MOVES = ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "scatter", "bitcast",
         "reshape")  # fmt: skip
# The names of scopes that stand for modules of a model. The rest of an operation's path is internal to JAX.
SCOPES = re.compile(r"^(layers(\.\d+)?|attn|mlp|moe|norm|embed|head|loss|optimizer|attention|router|experts|adapter)$")


@dataclass(frozen=True)
class Row:
    """A row of a table: a group of operations, per step.

    seconds: the time of the operations in one step.
    share: the share of the wall time.
    flops, bytes: the FLOPs and bytes of one step according to the program, None where unknown.
    count: the number of executions in one step.
    example: the operation that took the most time.
    """

    name: str
    seconds: float
    share: float
    flops: float | None = None
    bytes: float | None = None
    count: float = 0.0
    example: str = ""

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes and self.seconds else None

    @property
    def intensity(self) -> float | None:
        """The arithmetic intensity in FLOPs per byte, which decides on which side of the roofline's ridge the operations lie."""
        return self.flops / self.bytes if self.flops and self.bytes else None


@dataclass(frozen=True)
class Profile:
    """The tables of a capture.

    step_s: the wall seconds of a step, by the independent clock.
    busy_s: the seconds of a step in which the device computed.
    layers, kinds, ops: the rows by layer, by kind and by operation.
    notes: sentences about the capture for the reader.
    """

    window: Window
    step_s: float
    busy_s: float
    layers: list[Row]
    kinds: list[Row]
    ops: list[Row]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Operation:
    """An operation of the program: its layer, its kind, and the FLOPs and bytes of one execution."""

    layer: str
    kind: str
    flops: int
    bytes: int


def profile_of(window: Window, trace: Trace, program: HloModule | None) -> Profile:
    """Computes the tables of a capture.

    Args:
        program: the compiled step. With None, layers, FLOPs and bytes are unknown.
    """
    by_name = {} if program is None else operations(program)
    steps, wall = window.steps, window.wall_s
    idle = max(wall - trace.busy_s - sum(trace.others.values()), 0.0)
    data = min(window.data_s, idle)
    host = {DATA: data, HOST: idle - data, OTHERS: sum(trace.others.values())}

    def rows(key: Callable[[str, Operation | None], str]) -> list[Row]:
        seconds: dict[str, float] = defaultdict(float)
        work: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        largest: dict[str, str] = {}
        for op, spent in trace.seconds.items():
            about = by_name.get(op)
            name = key(op, about)
            seconds[name] += spent
            times = trace.counts[op]
            work[name][2] += times
            if about is not None and not is_container(op):
                work[name][0] += about.flops * times
                work[name][1] += about.bytes * times
            if spent > trace.seconds.get(largest.get(name, ""), -1.0):
                largest[name] = op
        out = []
        for name, s in seconds.items():
            flops, n_bytes, count = (total / steps for total in work[name])
            out.append(Row(name, s / steps, s / wall, flops or None, n_bytes or None, count, largest[name]))
        out += [Row(name, s / steps, s / wall) for name, s in host.items() if s > 0]
        return sorted(out, key=lambda row: -row.seconds)

    notes = []
    if by_name and (missing := sum(s for op, s in trace.seconds.items() if op not in by_name)) > 0.02 * trace.busy_s:
        notes.append(f"{missing / trace.busy_s:.0%} of the time is in operations that the program's text does not name")
    if trace.devices > 1:
        notes.append(f"operations of the first of {trace.devices} devices")
    return Profile(
        window,
        wall / steps,
        trace.busy_s / steps,
        rows(lambda op, about: about.layer if about else "unknown"),
        rows(lambda op, about: about.kind if about else _kind_of_name(op)),
        rows(lambda op, about: op),
        notes,
    )


def operations(program: HloModule) -> dict[str, Operation]:
    """Returns the operations of a program that a trace may name, by name."""
    out: dict[str, Operation] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode not in ("parameter", "constant", "get-tuple-element", "tuple"):
                out[instruction.name] = Operation(
                    layer_of(_op_path(program, instruction)),
                    operation_kind(program, instruction),
                    _flops(program, computation, instruction),
                    _bytes(computation, instruction),
                )
    return out


def layer_of(op_name: str) -> str:
    """Returns the module of the model in the path that JAX gave an operation, and the pass: `layers.3/attn`, `layers/mlp backward`."""
    # The name of a jitted function is not a scope.
    inner = re.sub(r"\bp?jit\([^()]*\)", "", op_name)
    parts = [part for part in re.split(r"[/()]", inner) if SCOPES.match(part)]
    # A scope may repeat, because the path of the backward pass contains that of the forward pass.
    parts = list(dict.fromkeys(parts))
    path = "/".join(parts[1:] if parts[:1] == ["loss"] and len(parts) > 1 else parts)
    which = next((name for mark, name in PASSES if mark in op_name), "")
    return f"{path or 'rest of the step'}{f' {which}' if which and path else ''}"


def operation_kind(program: HloModule, instruction: Instruction) -> str:
    """Returns the kind of an operation: matrix products, kernels, collectives, moves, reductions, element by element, loops."""
    opcode = instruction.opcode
    if opcode in ("fusion", "call", "async-start") and not is_container(instruction.name):
        called = [program.computations[name] for _, name in instruction.called() if name in program.computations]
        inner = {op.opcode for computation in called for op in computation.instructions}
        for kinds in (("dot", "convolution", "ragged-dot"), COLLECTIVES, ("reduce", "reduce-window", "sort"), ("scatter", "gather")):
            if main_opcode := next((name for name in inner if name.startswith(kinds)), None):
                return _kind(main_opcode)
        computing = inner - {"parameter", "constant", "tuple", "get-tuple-element", "broadcast", "convert", "iota"}
        return _kind("copy") if computing and all(name in MOVES for name in computing) else "element by element"
    if opcode == "custom-call":
        target = products.call_target(instruction)
        return "matrix products" if re.search(r"gemm|matmul|dot|cublas|onednn|ynn", target, re.IGNORECASE) else f"kernels ({target})"
    return _kind(opcode)


def _kind(opcode: str) -> str:
    if opcode in ("dot", "convolution", "ragged-dot"):
        return "matrix products"
    if opcode.startswith(COLLECTIVES):
        return "collectives"
    if opcode in ("while", "conditional", "call"):
        return "loops and calls"
    if opcode in MOVES or opcode.startswith("copy"):
        return "moves"
    if opcode.startswith(("reduce", "sort")):
        return "reductions"
    return "random numbers" if opcode.startswith("rng") else "element by element"


def _kind_of_name(op: str) -> str:
    """Returns the kind of an operation that the text of the program lacks, judged by its name."""
    return _kind(re.sub(r"[.\d]+$", "", op).removeprefix("wrapped_").replace("_", "-"))


def _op_path(program: HloModule, instruction: Instruction) -> str:
    """Returns the path that JAX gave an operation. For a fusion without a path, returns that of the computation inside."""
    if instruction.op_name:
        return instruction.op_name
    inner = [program.computations[name].root.op_name for _, name in instruction.called() if name in program.computations]
    return next((name for name in inner if name), "")


def _flops(program: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Returns the FLOPs of the products of one execution, including those inside a fusion."""
    if is_container(instruction.name) or instruction.opcode == "while":
        return 0
    flops = products.flops(computation, instruction) or 0
    for _, name in instruction.called():
        inner = program.computations.get(name)
        if inner is not None and instruction.opcode in ("fusion", "call"):
            flops += sum(_flops(program, inner, op) for op in inner.instructions)
    return flops


def _bytes(computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes of the operands and the result of one execution."""
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    return type_bytes(instruction.type) + sum(type_bytes(operand.type) for operand in operands)


def as_document(profile: Profile) -> Mapping[str, object]:
    """Returns the tables as a JSON object."""

    def rows(of: list[Row]) -> list[dict[str, object]]:
        return [
            {
                "name": row.name,
                "seconds": row.seconds,
                "share": row.share,
                "flops": row.flops,
                "bytes": row.bytes,
                "flops_per_s": row.flops_per_s,
                "bytes_per_s": row.bytes_per_s,
                "count": row.count,
                "example": row.example,
            }
            for row in of
        ]

    window = profile.window
    return {
        "steps": [window.first, window.last],
        "device": {"platform": window.platform, "kind": window.kind, "count": window.devices},
        "step_seconds": profile.step_s,
        "busy_seconds": profile.busy_s,
        "data_seconds": window.data_s / window.steps,
        "layers": rows(profile.layers),
        "kinds": rows(profile.kinds),
        "ops": rows(profile.ops),
        "notes": profile.notes,
    }
