"""An optimized HLO module: its computations, and how often each runs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from argosy.observe.hlo.loops import trip_count
from argosy.observe.hlo.text import HEADER, Computation, joined_lines, parse_instruction


@dataclass
class HloModule:
    """An optimized HLO module.

    computations: the computations, by name.
    entry: the name of the computation that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def read(cls, text: str) -> "HloModule":
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in joined_lines(text):
            if match := HEADER.match(line):
                current = computations[match[2]] = Computation(match[2])
                entry = match[2] if match[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (instruction := parse_instruction(line)) is not None:
                current.instructions.append(instruction)
        return cls(computations, entry)

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs, by name. Every branch of a conditional counts once, and so does a loop of unknown length."""
        times: Counter[str] = Counter({self.entry: 1})
        # HLO writes a computation before those that call it.
        for name in reversed(self.computations):
            for instruction in self.computations[name].instructions:
                for attribute, called in instruction.called():
                    trips = self.trips.get(instruction.name) if attribute == "body" else 1
                    times[called] += times[name] * (1 if trips is None else trips)
        return dict(times)

    @cached_property
    def trips(self) -> dict[str, int | None]:
        """How often each loop runs, by the name of its instruction; None if unknown."""
        whiles = ((c, i) for c in self.computations.values() for i in c.instructions if i.opcode == "while")
        return {i.name: trip_count(self.computations, c, i) for c, i in whiles}

    @property
    def unknown_loops(self) -> list[str]:
        """The names of the loops whose trip count is unknown. The analysis assumes that their bodies run once."""
        return [name for name, count in self.trips.items() if count is None]

    def running(self) -> Iterator[tuple[Computation, int]]:
        """Yields (computation, number of executions) for the computations that run."""
        for name, computation in self.computations.items():
            if times := self.times.get(name, 0):
                yield computation, times
