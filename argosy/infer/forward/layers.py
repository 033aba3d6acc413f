"""Compiles the layers of an unrolled model as programs of one or several layers, and rebuilds a model inside a traced program."""

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
    """The layers of an unrolled model as compiled programs, each of one or several consecutive layers.

    Args:
        model: an unrolled model.
        most: the most layers of one program. Programs have fewer where the model's plan of layers does not repeat.

    outside: the arguments of `traced_model` (graph, dtype, absent weights) for programs outside the layers.
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
        """The indices of the layers that are compiled. Later runs of the same kinds of layers share their programs."""
        first = {program: (start, end) for start, end, program in reversed(self._runs)}
        return [i for start, end in first.values() for i in range(start, end)]

    def divided(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        """Splits weights into those outside the layers, by parameter name, and those of each layer, by the name within the layer."""
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
        """Runs all layers. Returns the hidden states and the updated caches; the arrays in `caches` are donated.

        Args:
            weights: the weights of each layer, from `divided`.
            x: the hidden states before the first layer.
            caches: the cache of each layer, by its index as text.
            attend: an attention strategy (`parts.attention.attend`).
            run: calls the programs (`ops.programs.programs`).
            at: a key that stands for the shapes of these arguments, for `run`.
        """
        new_caches = {}
        for start, end, program in self._runs:
            x, after = run(program, at, weights[start:end], x, [caches.get(str(i)) for i in range(start, end)], attend)
            for i, cache in zip(range(start, end), after):
                new_caches[str(i)] = cache
        return x, new_caches


def equal_runs(kinds: Sequence[Any], most: int) -> list[tuple[int, int]]:
    """Divides layers into runs (start, end) of at most `most` layers. Where the sequence of kinds repeats, runs have the same kinds,
    and so share a program.

    Args:
        kinds: the kind of each layer. Layers of one kind have the same program.
    """
    runs = []
    for start, period, repeats in repeating(kinds):
        fitting = [n for n in range(1, repeats + 1) if repeats % n == 0 and n * period <= most]
        size = period * max(fitting) if fitting else 1
        runs += [(at, at + size) for at in range(start, start + period * repeats, size)]
    return runs


class AbsentWeights(dict[str, jax.ShapeDtypeStruct]):
    """The shapes of weights that a program does not use, by parameter name. The hash covers the names only, because the program does
    not depend on the shapes."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))


def traced_model(graph: Any, weights: Leaves, dtype: Any, absent: AbsentWeights | None = None) -> Any:
    """Rebuilds a model from its graph and weights, inside a program that is being traced.

    Args:
        absent: the shapes of the weights that are not among `weights`, because the program does not use them.
    """
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
