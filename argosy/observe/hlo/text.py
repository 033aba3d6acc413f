"""Parses the text of an optimized HLO module into computations, instructions and types.

The text is the result of `compiled.as_text()` for CPUs, GPUs and TPUs. It has some traps:
- Pallas kernels put line breaks inside an instruction, also lines that begin with `}}`.
- XLA annotates loops with their trip counts only on CPUs and GPUs. On TPUs they are read from the condition of the loop.
- Comments such as `/*index=5*/` stand between the elements of a long tuple.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from argosy.core.errors import Unsupported

# The bits of an element of each type. Types of less than a byte are packed.
BITS = {"pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
BITS |= {f"{sign}{n}": n for sign in "su" for n in (8, 16, 32, 64)} | {"c64": 64, "c128": 128, "token": 0, "opaque": 0}
BITS |= dict.fromkeys(("f8e5m2", "f8e5m2fnuz", "f8e4m3", "f8e4m3fn", "f8e4m3fnuz", "f8e4m3b11fnuz", "f8e3m4", "f8e8m0fnu"), 8)

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
COMMENT = re.compile(r"/\*.*?\*/")
HEADER = re.compile(r"^(ENTRY )?%?([\w.$-]+) \(.*\{$")
BEGINS = re.compile(r"^\s+(?:ROOT )?%[\w.$-]+ = ")
NAMED = re.compile(r"^\s*(ROOT )?%([\w.$-]+) = ")
OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
CALLED = re.compile(r"(\w+)=(%[\w.$-]+|\{%[^}]*\})")
TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    type: the type of the result, with layouts.
    operands: the names of the operands.
    arguments: the text between the parentheses, with the operands.
    attributes: the text after the operands.
    root: whether the instruction is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return type_bytes(self.type)

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute, a word or a text in braces; None if the instruction lacks the attribute."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return match[1] if match else None

    def numbers(self, name: str) -> list[int]:
        """Returns the numbers of an attribute such as `dimensions={0,1}`; empty if the instruction lacks it."""
        return [int(n) for n in re.findall(r"\d+", self.attribute(name) or "")]

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation, such as `jit(step)/while/body/dot_general`; "" if it has none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def called(self) -> Iterator[tuple[str, str]]:
        """Yields (attribute, name) for the computations that the instruction calls."""
        for attribute, names in CALLED.findall(self.attributes):
            for name in re.findall(r"%([\w.$-]+)", names):
                yield attribute, name


@dataclass
class Computation:
    """A computation with its instructions in the order of the text, which is the schedule if the module is scheduled."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The index of each parameter, by name."""
        return {i.name: int(i.arguments or 0) for i in self.instructions if i.opcode == "parameter"}


def joined_lines(text: str) -> Iterator[str]:
    """Yields the lines of a module. The lines of an instruction that spans several are joined."""
    pending = ""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        ends = line == "}" and (number + 1 == len(lines) or not lines[number + 1].strip())
        if ends or HEADER.match(line) or BEGINS.match(line):
            if pending:
                yield pending
            pending = ""
            if ends or not BEGINS.match(line):
                yield line
            else:
                pending = line
        elif pending:
            pending += " " + line
    if pending:
        yield pending


def parse_instruction(line: str) -> Instruction | None:
    line = COMMENT.sub("", line)
    match = NAMED.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) if line[start] == "(" else _type_end(line, start)
    opcode = OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close - 1]
    operands = tuple(re.findall(r"%([\w.$-]+)", arguments))
    return Instruction(match[2], line[start:end], opcode[1], operands, arguments, line[close:], match[1] is not None)


def _closing(line: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        if line[place] == "(":
            depth += 1
        elif line[place] == ")":
            depth -= 1
            if depth == 0:
                return place + 1
    return len(line)


def _type_end(line: str, start: int) -> int:
    end = line.find(" ", start)
    return end if end >= 0 else len(line)


def dimensions(type_: str) -> list[int]:
    """Returns the shape of an array type, or of the first array of a tuple type."""
    match = ARRAY.search(type_)
    return [int(d.strip("<=")) for d in match[2].split(",") if d] if match else []


def elements(type_: str) -> int:
    """Returns the number of elements of an array type."""
    return math.prod(dimensions(type_))


@lru_cache(maxsize=65536)
def type_bytes(type_: str) -> int:
    """Returns the bytes of a type, without the padding of its layout.

    Raises:
        Unsupported: the type of an element is unknown.
    """
    total = 0
    for name, dims in ARRAY.findall(type_):
        if name not in BITS:
            raise Unsupported(f"the program has elements of type `{name}`, whose size is unknown")
        total += -(-math.prod(int(d.strip("<=")) for d in dims.split(",") if d) * BITS[name] // 8)
    return total


def tuple_elements(type_: str) -> list[str]:
    """Returns the types of the elements of a tuple type; only the type itself if it is not a tuple."""
    if not type_.startswith("("):
        return [type_]
    out, depth, last = list[str](), 0, 1
    for place in range(1, len(type_) - 1):
        depth += (type_[place] in "({[") - (type_[place] in ")}]")
        if type_[place] == "," and depth == 0:
            out.append(type_[last:place].strip())
            last = place + 1
    return [*out, type_[last:-1].strip()]
