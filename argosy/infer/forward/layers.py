"""The layers of an unrolled model as programs, one layer or several at a time; and a model while a program is traced."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jaxtyping import Array

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.stack import Layer, repeating, run_block
from argosy.models.parts.weight import Leaves, merge, split
from argosy.ops.programs.programs import Program, RunProgram, run_jitted


class LayerPrograms:
    """The layers of an unrolled model, called one by one, or several at a time.

    Args:
        most: layers of a program, at most. There are fewer where the plan does not repeat.

    outside: what a program outside the layers is compiled for; see `traced_model`.
    """

    def __init__(self, model: Any, most: int = 1):
        stack, (graph, weights) = model.layers, split(model)
        layers = [split(getattr(stack, str(i))) for i in range(len(stack.plan))]
        self._addresses = [{leaf: f"layers.{i}.{leaf}" for leaf in leaves} for i, (_, leaves) in enumerate(layers)]
        inside = {address for names in self._addresses for address in names.values()}
        absent = {address: jax.ShapeDtypeStruct(a.shape, a.dtype) for address, a in weights.items() if address in inside}
        self._outside = [address for address in weights if address not in inside]
        kinds = [(graph, layer) for (graph, _), layer in zip(layers, stack.plan)]
        numbers: dict[Any, int] = {}
        alike = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self._runs = [(start, end, _layers(tuple(kinds[start:end]))) for start, end in equal_runs(alike, most)]
        self.outside = graph, model.dtype, AbsentWeights(absent)

    @property
    def compiled_layers(self) -> list[int]:
        """The layers that are compiled: the first run of each kind, whose program the others share."""
        first = {program: (start, end) for start, end, program in reversed(self._runs)}
        return [i for start, end in first.values() for i in range(start, end)]

    def divided(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        """The weights outside the layers, and the weights of each layer by its own names."""
        layers = [{leaf: weights[a] for leaf, a in names.items() if a in weights} for names in self._addresses]
        return {address: weights[address] for address in self._outside if address in weights}, layers

    def __call__(
        self,
        weights: Sequence[Leaves],
        x: Any,
        caches: Mapping[str, Any],
        attend: Any,
        run: RunProgram = run_jitted,
        at: Hashable = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The hidden states after all layers, and their caches, in place.

        Args:
            attend: a strategy (`parts.attention.attend`).
            run, at: how programs are called, and what stands for the shapes of these arguments (`ops.programs.programs`).
        """
        new_caches = {}
        for start, end, program in self._runs:
            x, after = run(program, at, weights[start:end], x, [caches.get(str(i)) for i in range(start, end)], attend)
            for i, cache in zip(range(start, end), after):
                new_caches[str(i)] = cache
        return x, new_caches


def equal_runs(kinds: Sequence[Any], most: int) -> list[tuple[int, int]]:
    """Layers of these kinds as runs (start, end) of at most this many. Where the plan repeats, runs are alike, and share a program."""
    runs = []
    for start, period, repeats in repeating(kinds):
        fitting = [n for n in range(1, repeats + 1) if repeats % n == 0 and n * period <= most]
        size = period * max(fitting) if fitting else 1
        runs += [(at, at + size) for at in range(start, start + period * repeats, size)]
    return runs


class AbsentWeights(dict[str, jax.ShapeDtypeStruct]):
    """Shapes of weights that a program does not use. Hashable, because the program does not depend on them."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))


def traced_model(graph: Any, weights: Leaves, dtype: Any, absent: AbsentWeights | None = None) -> Any:
    """A model while a program is traced, whose layers may be absent."""
    model = merge(graph, weights if absent is None else weights | absent)
    model.dtype = dtype
    return model


@lru_cache(maxsize=256)
def _layers(kinds: tuple[tuple[Any, Layer], ...]) -> Any:
    """(weights of each layer, x, caches, strategy) -> (x, caches)."""

    def several(weights: Sequence[Leaves], x: Array, caches: Sequence[Any], attend: Attend) -> tuple[Array, list[Any]]:
        new_caches = []
        for (graph, layer), leaves, cache in zip(kinds, weights, caches, strict=True):
            x, cache, _ = run_block(graph, layer, leaves, x, cache, attend, "none", unrolled=True)
            new_caches.append(cache)
        return x, new_caches

    return Program(several, donate=2)
