"""The forward pass of a model, and what is computed from its last hidden states, as one program or as programs of its parts.

XLA:CPU compiles a program in time proportional to its layers. `ByParts` compiles each kind of layer once and calls it layer by layer:
SmolLM2 135M takes 2.5 CPU seconds where the whole program takes 10 to 14, and a step costs the same to 5 %.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array

from argosy.infer.cpu.views import viewable
from argosy.infer.engine.programs import Program, Run, plainly
from argosy.models.parts.attend import Attend
from argosy.models.parts.cache import Caches, laid_out
from argosy.models.parts.stack import Layer, repeating, run_block
from argosy.models.parts.weight import Leaves, merge, split
from argosy.parallel.scope import on_several_devices

# (model, last hidden states [B T D] after the norm, further arguments) -> arrays. Compiled functions are found by it again, so it is
# a function of a module.
Tail = Callable[..., Any]


@runtime_checkable
class Pass(Protocol):
    """The forward pass of one model."""

    def __call__(
        self, weights: Leaves, tail: Tail, tokens: Any, attend: Attend, caches: Caches | None, *more: Any
    ) -> tuple[Any, Caches | None]:
        """What `tail` makes of the hidden states, and the caches after these tokens, in place.

        Args:
            tokens: [B T].
            more: further arguments of the tail.
        """
        ...


def pass_of(model: Any, weights: Leaves) -> Pass:
    """The forward pass for where these weights are. Scanned layers are one program anyway."""
    return ByParts(model) if viewable(weights) and not model.layers.run.stacked else OneProgram(model)


class OneProgram:
    def __init__(self, model: Any):
        self._of = split(model)[0], model.dtype

    def __call__(
        self, weights: Leaves, tail: Tail, tokens: Any, attend: Attend, caches: Caches | None, *more: Any
    ) -> tuple[Any, Caches | None]:
        return _one_program(*self._of, tail)(weights, tokens, attend, caches, *more)


class ByParts:
    def __init__(self, model: Any):
        self.layers = Layers(model)

    def __call__(
        self, weights: Leaves, tail: Tail, tokens: Any, attend: Attend, caches: Caches | None, *more: Any
    ) -> tuple[Any, Caches | None]:
        outside, layers = self.layers.prepared(weights)
        x, attend = _before(*self.layers.outside)(outside, tokens, attend)
        x, kept = self.layers(layers, x, caches or {}, attend)
        return _after(*self.layers.outside, tail)(outside, x, *more), caches and kept


class Layers:
    """The layers of an unrolled model, called one by one, or several at a time.

    Args:
        most: layers of a program, at most. There are fewer where the plan does not repeat.

    outside: what a program outside the layers is compiled for; see `model_of`.
    """

    def __init__(self, model: Any, most: int = 1):
        stack, (graph, weights) = model.layers, split(model)
        layers = [split(getattr(stack, str(i))) for i in range(len(stack.plan))]
        self._addresses = [{own: f"layers.{i}.{own}" for own in leaves} for i, (_, leaves) in enumerate(layers)]
        inside = {address for own in self._addresses for address in own.values()}
        absent = {address: jax.ShapeDtypeStruct(a.shape, a.dtype) for address, a in weights.items() if address in inside}
        self._outside = [address for address in weights if address not in inside]
        kinds = [(own, layer) for (own, _), layer in zip(layers, stack.plan)]
        known: dict[Any, int] = {}
        alike = [known.setdefault(kind, len(known)) for kind in kinds]
        self._runs = [(start, end, _layers(tuple(kinds[start:end]))) for start, end in runs(alike, most)]
        self.outside = graph, model.dtype, Absent(absent)

    def prepared(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        """Those of these weights that are outside the layers, and those of each layer by its own names."""
        layers = [{own: weights[a] for own, a in names.items() if a in weights} for names in self._addresses]
        return {address: weights[address] for address in self._outside if address in weights}, layers

    def __call__(
        self,
        weights: Sequence[Leaves],
        x: Any,
        caches: Mapping[str, Any],
        attend: Any,
        run: Run = plainly,
        at: Hashable = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The hidden states after all layers, and their caches, in place.

        Args:
            attend: a strategy (`parts.attend`).
            run, at: how programs are called, and what stands for the shapes of these arguments (`infer.engine.programs`).
        """
        kept = {}
        for start, end, program in self._runs:
            x, after = run(program, at, weights[start:end], x, [caches.get(str(i)) for i in range(start, end)], attend)
            for i, cache in zip(range(start, end), after):
                kept[str(i)] = cache
        return x, kept


def runs(kinds: Sequence[Any], most: int) -> list[tuple[int, int]]:
    """Layers of these kinds as runs (start, end) of at most this many. Where the plan repeats, runs are alike, and share a program."""
    found = []
    for start, period, repeats in repeating(kinds):
        fitting = [n for n in range(1, repeats + 1) if repeats % n == 0 and n * period <= most]
        size = period * max(fitting) if fitting else 1
        found += [(at, at + size) for at in range(start, start + period * repeats, size)]
    return found


class Absent(dict[str, jax.ShapeDtypeStruct]):
    """Weights that a program does not use, as descriptions. Hashable, because what is compiled does not depend on them."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))


def model_of(graph: Any, weights: Leaves, dtype: Any, absent: Absent | None = None) -> Any:
    """A model while a program is traced, whose layers may be absent."""
    model = merge(graph, weights if absent is None else weights | absent)
    model.dtype = dtype
    return model


@lru_cache(maxsize=64)
def _one_program(graph: Any, dtype: Any, tail: Tail) -> Any:
    def one_program(weights: Leaves, tokens: Array, attend: Attend, caches: Any, *more: Array) -> Any:
        model = model_of(graph, weights, dtype)
        x, caches, _ = model.hidden(tokens, attend, caches)
        if caches is not None and on_several_devices():
            # In each pass as before it, or XLA might choose others and the next pass would compile again.
            caches = laid_out(model.layers.holds(), caches)
        return tail(model, x, *more), caches

    return jax.jit(one_program, donate_argnums=3)


@lru_cache(maxsize=16)
def _before(graph: Any, dtype: Any, absent: Absent) -> Any:
    def before(outside: Leaves, tokens: Array, attend: Attend) -> tuple[Array, Attend]:
        model = model_of(graph, outside, dtype, absent)
        return model.embedded(tokens, attend), model.layers.with_angles(attend)

    return jax.jit(before)


@lru_cache(maxsize=256)
def _layers(kinds: tuple[tuple[Any, Layer], ...]) -> Any:
    """(weights of each layer, x, caches, strategy) -> (x, caches)."""

    def several(weights: Sequence[Leaves], x: Array, caches: Sequence[Any], attend: Attend) -> tuple[Array, list[Any]]:
        kept = []
        for (graph, layer), own, cache in zip(kinds, weights, caches, strict=True):
            x, cache, _ = run_block(graph, layer, own, x, cache, attend, "none", unrolled=True)
            kept.append(cache)
        return x, kept

    return Program(several, donate=2)


@lru_cache(maxsize=64)
def _after(graph: Any, dtype: Any, absent: Absent, tail: Tail) -> Any:
    def after(outside: Leaves, x: Array, *more: Array) -> Any:
        model = model_of(graph, outside, dtype, absent)
        return tail(model, model.norm(x), *more)

    return jax.jit(after)
