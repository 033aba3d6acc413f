"""Computes how often a loop of an HLO module runs, from XLA's annotation, or from the counter's first value, step and limit."""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from argosy.observe.hlo.text import TRIPS, Computation, Instruction

Computations = Mapping[str, Computation]

# Operations that do not change a scalar.
TRANSPARENT = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
# The scope that the author of a loop gives it if its length is unknown and it seldom runs at all.
SELDOM = "seldom"
SCALAR = re.compile(r"^[su]\d+\[\]")
MOST = 32


class Scalar(NamedTuple):
    """A scalar of a loop: a constant, or an element of the loop's state."""

    kind: Literal["constant", "state"]
    value: int


def trip_count(computations: Computations, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often the body of a loop runs. If that is unknown, returns None, or 0 for loops in the scope `SELDOM`.

    Args:
        computation: the computation that contains the loop.
    """
    trips = _known_trips(computations, computation, loop)
    return 0 if trips is None and re.search(rf"\b{SELDOM}\b", loop.op_name) else trips


def _known_trips(computations: Computations, computation: Computation, loop: Instruction) -> int | None:
    if match := TRIPS.search(loop.attributes):
        return int(match[1])
    called = dict(loop.called())
    condition, body = (computations.get(called.get(key, "")) for key in ("condition", "body"))
    if condition is None or body is None:
        return None
    compared = _comparison(computations, condition, condition.root, {})
    if compared is None:
        return None
    left, right, direction = compared
    if (left.kind, right.kind) == ("constant", "state"):
        left, right = right, left
        direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if (left.kind, right.kind) != ("state", "constant"):
        return None
    first, step = _first(computation, loop, left.value), _step(computations, body, left.value)
    if first is None or not step:
        return None
    away = right.value - first
    if direction == "NE":
        return away // step if away % step == 0 else None
    if (direction in ("LT", "LE")) != (step > 0):
        return None
    away += (step > 0) - (step < 0) if direction in ("LE", "GE") else 0
    return max(0, -(-away // step))


def _scalar(
    computations: Computations, computation: Computation, name: str, bound: Mapping[int, Scalar], depth: int = 0
) -> Scalar | None:
    """Returns the constant or the element of the loop's state that a name stands for; None if it is neither.

    Args:
        bound: the arguments of a fused computation, by parameter number. Empty if the parameter is the state of the loop.
    """
    instruction = computation.by_name.get(name)
    if instruction is None or depth > MOST:
        return None
    if instruction.opcode == "constant":
        return Scalar("constant", int(instruction.arguments)) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if instruction.opcode == "parameter":
        return bound.get(int(instruction.arguments or 0))
    if instruction.opcode == "get-tuple-element":
        source = computation.by_name.get(instruction.operands[0])
        index = instruction.numbers("index")
        return Scalar("state", index[0]) if source is not None and source.opcode == "parameter" and not bound and index else None
    if instruction.opcode in TRANSPARENT:
        return _scalar(computations, computation, instruction.operands[0], bound, depth + 1)
    return None


def _comparison(
    computations: Computations, computation: Computation, instruction: Instruction, bound: Mapping[int, Scalar]
) -> tuple[Scalar, Scalar, str] | None:
    """Returns both sides and the direction of the comparison that an instruction computes; None if it computes none."""
    if instruction.opcode == "compare":
        sides = [_scalar(computations, computation, name, bound) for name in instruction.operands[:2]]
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            return sides[0], sides[1], instruction.attribute("direction") or ""
        return None
    if instruction.opcode in ("fusion", "call"):
        inner = _callee(computations, instruction)
        if inner is None:
            return None
        scalars = ((n, _scalar(computations, computation, name, bound)) for n, name in enumerate(instruction.operands))
        return _comparison(computations, inner, inner.root, {n: scalar for n, scalar in scalars if scalar is not None})
    if instruction.opcode in TRANSPARENT and (source := computation.by_name.get(instruction.operands[0])) is not None:
        return _comparison(computations, computation, source, bound)
    return None


def _first(computation: Computation, loop: Instruction, index: int) -> int | None:
    """Returns the first value of an element of the state. If it is not a constant, returns 0, where JAX's loops begin."""
    state = computation.by_name.get(loop.operands[0]) if loop.operands else None
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return 0
    name = state.operands[index]
    for _ in range(MOST):
        source = computation.by_name.get(name)
        if source is None:
            return 0
        if source.opcode == "constant":
            return int(source.arguments) if re.fullmatch(r"-?\d+", source.arguments) else None
        if source.opcode not in TRANSPARENT:
            return 0
        name = source.operands[0]
    return 0


def _step(computations: Computations, body: Computation, index: int) -> int:
    """Returns the increment of an element of the state per iteration. If the addition is not found, returns 1, as in JAX's loops."""
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return 1
    name, computation, bound = root.operands[index], body, dict[int, Scalar]()
    for _ in range(MOST):
        source = computation.by_name.get(name)
        if source is None:
            return 1
        if source.opcode in TRANSPARENT:
            name = source.operands[0]
            continue
        if source.opcode == "fusion" and SCALAR.match(source.type) and (inner := _callee(computations, source)) is not None:
            scalars = ((n, _scalar(computations, computation, operand, bound)) for n, operand in enumerate(source.operands))
            bound = {n: scalar for n, scalar in scalars if scalar is not None}
            computation, name = inner, inner.root.name
            continue
        if source.opcode in ("add", "subtract"):
            sides = [_scalar(computations, computation, operand, bound) for operand in source.operands]
            constants = [side.value for side in sides if side is not None and side.kind == "constant"]
            if len(constants) == 1:
                return constants[0] if source.opcode == "add" else -constants[0]
        return 1
    return 1


def _callee(computations: Computations, instruction: Instruction) -> Computation | None:
    names = [name for attribute, name in instruction.called() if attribute in ("calls", "to_apply")]
    return computations.get(names[0]) if names else None
