"""Keeps what was made from a module between calls, and makes it anew when the structure of the module has changed.

Splitting a module of 270 weights takes 15 ms, walking it 1 ms. The walk collects the identity of every variable and attribute, so
surgery, adapters and another dtype are noticed, because each replaces an object. Values are not part of it: new weights are used
at once, and replaced ones are not kept in memory.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from argosy.core.progress import Say
from argosy.infer.engine import Engine
from argosy.infer.memory import mesh_of, needs_of, room_for_cache
from argosy.infer.sequences import Sequences
from argosy.infer.settings import EngineSettings
from argosy.models.parts.weight import variables

PAGE = 16
# The most sequences that run at a time.
SLOTS = 32


class Room(NamedTuple):
    """What an engine has room for: sequences at a time, tokens of one, pages of all."""

    slots: int = 1
    context: int = 512
    pages: int = 0

    def grown(self, lengths: Sequence[int], most: int) -> "Room":
        """Room for sequences of these lengths too, in sizes that grow by large steps, because each is compiled.

        Args:
            most: the model's context.
        """
        slots, context = self.slots, min(self.context, most)
        while slots < min(len(lengths), SLOTS):
            slots = min(slots * 8, SLOTS)
        while context < max(lengths):
            context = min(context * 4, most)
        needed = sum(sorted((-(-length // PAGE) for length in lengths), reverse=True)[:slots])
        pages = max(self.pages, -(-context // PAGE))
        while pages < needed:
            pages *= 2
        return Room(slots, context, pages)


class Held:
    """Holds what was made from a module in its current state."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._sequences: Sequences | None = None
        self._engine: Engine | None = None
        self._room = Room()

    def sequences(self, module: Any, say: Say | None = None) -> Sequences:
        """The forward pass over whole sequences."""
        self._look(module)
        if self._sequences is None:
            self._sequences = Sequences(module)
        self._sequences.say = say
        return self._sequences

    def engine(self, module: Any, lengths: Sequence[int], say: Say | None = None) -> Engine:
        """An engine with room for sequences of these lengths, many of them one after the other. Requests that run in a smaller one
        end there; another takes its place at once only where a sequence would not fit."""
        self._look(module)
        room = self._room.grown(lengths, module.config.context)
        fits = max(lengths) <= self._room.context
        if self._engine is None or (room != self._room and not (fits and self._engine.has_requests)):
            self._engine = None  # its cache is free before the next one is allocated
            weights = {address: v.get_value() for address, v in variables(module).items()}
            settings = EngineSettings(slots=room.slots, page=PAGE, context=room.context)
            needs = needs_of(module.layers.holds(), settings, module.dtype, room.context)
            pages = min(room.pages, needs.fitting(room.slots, room_for_cache(weights), mesh_of(weights)).pages)
            self._engine, self._room = Engine(module, settings.model_copy(update={"pages": pages})), room
        self._engine.say = say
        return self._engine

    def forget(self) -> None:
        """Frees the cache."""
        self._engine, self._room = None, Room()

    def _look(self, module: Any) -> None:
        found = identities(module)
        if len(found) != len(self._found) or not all(map(operator.is_, found, self._found)):
            self._found, self._sequences = found, None
            self.forget()


def identities(module: Any) -> list[Any]:
    """Every object that a module consists of, in the order of its attributes; for weights the variables, not their values. The
    list keeps them alive, so that no identity is reused."""
    out: list[Any] = []
    inside: set[int] = set()

    def walk(node: Any) -> None:
        out.append(node)
        if isinstance(node, nnx.Variable):
            out.extend(node.get_metadata().values())
        elif isinstance(node, nnx.Module | dict | list | tuple) and id(node) not in inside:
            inside.add(id(node))
            for name, value in _children(node):
                out.append(name)
                walk(value)

    walk(module)
    return out


def _children(node: Any) -> Any:
    if isinstance(node, nnx.Module):
        return vars(node).items()
    return node.items() if isinstance(node, dict) else ((None, value) for value in node)
