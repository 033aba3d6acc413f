"""Layers as a plan, and the strategies that run it.

A plan lists the layers: `Layer(kind, each)`, where the kind is the structure of its weights and `each` what else is fixed
about it (a window, a rope base). How it runs is set from outside and fixes how weights lie in memory:

    Unroll    a list of layers, "layers.3.attn.q.w": fastest on CPUs (15 to 25 % in training, twice in decoding) and when shallow
    Scan      one array for all layers of a kind, "layers.block.attn.q.w" [L ...]: compile time constant in depth; TPUs

Whatever the layout, a layer's weights also have a name of their own, "layers.3.attn.q.w": the one that Hub tables,
checkpoints of the other layout and random draws go by (`layer_addresses`, `to_layers`, `from_layers`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.attend import Attend
from argosy.models.parts.cache import Cache, Spec, Specs
from argosy.models.parts.weight import Leaves, merge, split, variables

Remat = Literal["none", "dots", "full"]
Told = dict[str, dict[str, Array]]  # {kind: {what: [layers of that kind]}}


@dataclass(frozen=True)
class Layer:
    """One entry of the plan: the kind of block, and what else is fixed about it."""

    kind: str
    each: Hashable = None


@runtime_checkable
class Block(Protocol):
    """What a family writes: one layer."""

    def holds(self, each: Any) -> Spec: ...

    def __call__(
        self, x: Array, each: Any, cache: Cache | None, attend: Attend
    ) -> tuple[Array, Cache | None, dict[str, Array]]: ...


class Step(NamedTuple):
    """One layer as a pure function of its weights."""

    remat: Remat
    rows: Any = None  # where the residual stream lies on a mesh

    def __call__(self, graph: Any, layer: Layer, weights: Leaves, x: Array, cache: Cache | None, attend: Attend) -> Any:
        def run(weights: Leaves, x: Array, cache: Cache | None, attend: Attend) -> Any:
            x, cache, said = merge(graph, weights)(x, layer.each, cache, attend)
            return on_rows(x, self.rows), cache, said

        return rematerialised(run, self.remat)(weights, x, cache, attend)


def on_rows(x: Array, rows: Any) -> Array:
    """x [B T D], each device its rows. Without this, XLA may split the contraction over D instead, where the weights are
    split over it, and sum activations of the whole batch over the devices."""
    return x if rows is None else jax.lax.with_sharding_constraint(x, rows)


def rematerialised(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """none: keep what the backward pass needs. dots: keep matrix products only. full: keep the input only."""
    if remat == "none":
        return function
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(function, policy=policy)


@runtime_checkable
class Run(Protocol):
    """A strategy. `stacked` says how weights and caches lie: one array for all layers of a kind, or one a layer."""

    @property
    def stacked(self) -> bool: ...

    @property
    def remat(self) -> Remat: ...

    def __call__(self, stack: "Stack", step: Step, x: Array, cache: Any, attend: Attend) -> tuple[Array, Any, Told]: ...


@dataclass(frozen=True)
class Unroll:
    """One layer after the other in the program."""

    remat: Remat = "none"
    stacked = False

    def __call__(self, stack: "Stack", step: Step, x: Array, cache: Any, attend: Attend) -> tuple[Array, Any, Told]:
        kept, told = {}, {}
        for i, layer in enumerate(stack.plan):
            name = str(i)
            graph, weights = split(getattr(stack, name))  # its own: layers of a kind may carry different adapters
            x, kept[name], said = step(graph, layer, weights, x, cache and cache[name], attend)
            told.setdefault(layer.kind, []).append(said)
        return x, cache and kept, {kind: _stack_trees(said) for kind, said in told.items()}


@dataclass(frozen=True)
class Scan:
    """lax.scan over the smallest repeating group of the plan; what does not repeat follows as groups of one."""

    remat: Remat = "none"
    stacked = True

    def __call__(self, stack: "Stack", step: Step, x: Array, cache: Any, attend: Attend) -> tuple[Array, Any, Told]:
        apart = {kind: split(getattr(stack, kind)) for kind in stack.kinds}
        graphs = {kind: graph for kind, (graph, _) in apart.items()}
        weights = {kind: leaves for kind, (_, leaves) in apart.items()}
        taken: dict[str, int] = {}
        outs = []
        for start, period, repeats in groups(stack.plan):
            part = stack.plan[start : start + period]

            def take(tree: Any, name: str, uses: int, repeats: int = repeats) -> Any:
                low = taken.get(name, 0)
                taken[name] = low + uses * repeats
                return jax.tree.map(lambda a: a[low : low + uses * repeats].reshape(repeats, uses, *a.shape[1:]), tree)

            kinds, names = _tally(l.kind for l in part), _tally(stack.cache_name(l) for l in part)
            xs = (
                {kind: take(weights[kind], kind, n) for kind, n in kinds.items()},
                cache and {name: take(cache[name], f"cache {name}", n) for name, n in names.items()},
            )

            def body(x: Array, group: Any, part: tuple[Layer, ...] = part) -> Any:
                weights, cache = group
                return _one_group(stack, step, graphs, part, x, weights, cache, attend)

            x, ys = jax.lax.scan(body, x, xs)
            outs.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), ys))
        return x, cache and _join([kept for kept, _ in outs]), _join([told for _, told in outs])


def _one_group(
    stack: "Stack",
    step: Step,
    graphs: Mapping[str, Any],
    part: Sequence[Layer],
    x: Array,
    weights: Any,
    cache: Any,
    attend: Attend,
) -> Any:
    """The layers of one group, each with its slice of the weights and caches."""
    seen: dict[str, int] = {}
    kept, told = {}, {}
    for layer in part:
        name = stack.cache_name(layer)
        i = seen[layer.kind] = seen.get(layer.kind, -1) + 1
        j = seen["cache " + name] = seen.get("cache " + name, -1) + 1
        x, new, said = step(
            graphs[layer.kind], layer, _at(weights[layer.kind], i), x, cache and _at(cache[name], j), attend
        )
        kept.setdefault(name, []).append(new)
        told.setdefault(layer.kind, []).append(said)
    return x, (cache and {n: _stack_trees(v) for n, v in kept.items()}, {k: _stack_trees(v) for k, v in told.items()})


def groups(plan: Sequence[Layer]) -> list[tuple[int, int, int]]:
    """The plan as (start, period, repeats): at each point the repetition that covers most, of the shortest period."""
    out, start = [], 0
    while start < len(plan):
        period, repeats = 1, 1
        for p in range(1, (len(plan) - start) // 2 + 1):
            r = 1
            while plan[start + r * p : start + (r + 1) * p] == plan[start : start + p]:
                r += 1
            if r > 1 and p * r > period * repeats:
                period, repeats = p, r
        out.append((start, period, repeats))
        start += period * repeats
    return out


class Stack(nnx.Module):
    """The layers of a model.

    Args:
        plan: the layers in order.
        make: builds a block of a kind.
        run: how they run, and so how they lie in memory.
    """

    def __init__(self, plan: Sequence[Layer], make: Callable[[str], Any], *, run: Run):
        self.plan, self.run = tuple(plan), run
        self.rows: Any = None  # a sharding for the residual stream, set from outside
        self.kinds = tuple(dict.fromkeys(layer.kind for layer in self.plan))
        if taken := [kind for kind in self.kinds if kind.isdigit() or hasattr(self, kind)]:
            raise ValueError(f"kinds of layers cannot be named {taken}")
        if run.stacked:
            for kind, indexes in self.indexes().items():
                setattr(self, kind, _deepened(make(kind), len(indexes)))
        else:
            for i, layer in enumerate(self.plan):
                setattr(self, str(i), make(layer.kind))

    def indexes(self) -> dict[str, tuple[int, ...]]:
        """Which layers are of each kind."""
        return {kind: tuple(i for i, layer in enumerate(self.plan) if layer.kind == kind) for kind in self.kinds}

    def example(self, layer: Layer) -> Any:
        """A block of this layer's kind, for asking what it holds."""
        return getattr(self, layer.kind if self.run.stacked else str(self.plan.index(layer)))

    def cache_name(self, layer: Layer) -> str:
        """Layers of one kind share a cache array unless they reach back differently far."""
        span = self.example(layer).holds(layer.each).span
        return layer.kind if span is None else f"{layer.kind}.{span}"

    def holds(self) -> Specs:
        """What the caller must allocate: {cache name: (what one layer holds, number of layers in the array, or None)}."""
        if not self.run.stacked:
            return {str(i): (self.example(layer).holds(layer.each), None) for i, layer in enumerate(self.plan)}
        out: dict[str, tuple[Spec, int | None]] = {}
        for layer in self.plan:
            name = self.cache_name(layer)
            out[name] = (self.example(layer).holds(layer.each), (out.get(name, (None, 0))[1] or 0) + 1)
        return out

    def __call__(self, x: Float[Array, "B T D"], cache: Any, attend: Attend) -> tuple[Float[Array, "B T D"], Any, Told]:
        return self.run(self, Step(self.run.remat, self.rows), on_rows(x, self.rows), cache, attend)


# ---------------------------------------------------------------- one layout and the other


def layer_addresses(model: nnx.Module) -> Callable[[str], list[str]]:
    """A function from a stored address to the per-layer names it holds, in the order of its leading axis."""
    stacks = {".".join([*map(str, path), ""]): s for path, s in nnx.iter_modules(model) if isinstance(s, Stack)}

    def names(address: str) -> list[str]:
        for prefix, stack in stacks.items():
            for kind, indexes in stack.indexes().items() if stack.run.stacked else ():
                if address.startswith(f"{prefix}{kind}."):
                    rest = address.removeprefix(f"{prefix}{kind}.")
                    return [f"{prefix}{i}.{rest}" for i in indexes]
        return [address]

    return names


def stored_addresses(model: nnx.Module) -> dict[str, tuple[str, int | None]]:
    """{per-layer name: (stored address, place on its leading axis, or None)}."""
    names = layer_addresses(model)
    out: dict[str, tuple[str, int | None]] = {}
    for address, v in variables(model).items():
        many = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        for i, name in enumerate(names(address)):
            out[name] = (address, i if many else None)
    return out


def to_layers(model: nnx.Module, leaves: Leaves) -> Leaves:
    """Weights by per-layer name; slices of what is stacked."""
    return {
        name: leaves[a] if i is None else leaves[a][i]
        for name, (a, i) in stored_addresses(model).items()
        if a in leaves
    }


def from_layers(model: nnx.Module, by_layer: Mapping[str, Any]) -> Leaves:
    """Weights as this model stores them, from per-layer ones; on the host, one stored array at a time."""
    out: Leaves = {}
    names = layer_addresses(model)
    for address, v in variables(model).items():
        many = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        parts = [by_layer[name] for name in names(address)]
        out[address] = np.stack([np.asarray(p) for p in parts]) if many else parts[0]
    return out


def _deepened(module: Any, layers: int) -> Any:
    """The module with every weight described for so many layers."""
    _, state = nnx.split(module)
    for path, v in nnx.to_flat_state(state):
        node = module
        for name in path[:-1]:
            node = getattr(node, str(name))
        getattr(node, str(path[-1])).set_value(jax.ShapeDtypeStruct((layers, *v.shape), v.dtype))
    return module


def _tally(names: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for name in names:
        out[name] = out.get(name, 0) + 1
    return out


def _at(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _stack_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def _join(parts: list[Any]) -> Any:
    """The outputs of the groups, one after the other."""
    out: dict[str, list[Any]] = {}
    for part in parts:
        for name, tree in part.items():
            out.setdefault(name, []).append(tree)
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *trees) for name, trees in out.items()}
