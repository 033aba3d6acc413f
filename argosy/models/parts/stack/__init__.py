"""The layers of a model as a plan, and the strategies that run it.

A plan lists the layers: `Layer(kind, each)`, where the kind is the structure of its weights and `each` its other fixed settings
(a window, a rope base). How it runs is set from outside and decides the layout of weights in memory:

    Unroll    a list of layers, "layers.3.attn.q.w": fastest on CPUs (15 to 25 % in training) and when shallow
    Scan      one array for the layers of a kind, "layers.block.attn.q.w" [L ...]: compile time constant in depth; TPUs

Scan runs the smallest repeating group of the plan in a loop, and the remaining layers as further groups. Each group has its own
arrays, because a slice of a longer array would copy the weights in every step. So the last two layers of Gemma 3 1B, after
four groups of six, are in "layers.block_2.attn.q.w" [2 ...].

In any layout, a layer's weights also have per-layer names, "layers.3.attn.q.w", which are used by Hub tables,
checkpoints of the other layout and random draws (`addresses`).

What flows through the layers is one array [B T D], or a tree of such arrays (streams: image and text). Every block also gets the
`condition` of the call: a tree of arrays that lead with the batch, such as an embedding of the time step or the memory of an encoder.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim
from jaxtyping import Array, Int

from argosy.models.parts.attention.attend import Attend, StackedAttend
from argosy.models.parts.attention.cache import Cache, Caches, Spec, Specs, joined_layers, parted_layers
from argosy.models.parts.attention.rope import Turns, angles
from argosy.models.parts.stack.hosted import any_hosted, brought
from argosy.models.parts.stack.remat import INPUT, Remat, on_picked_weights, rematerialize
from argosy.models.parts.stack.watch import OUTPUT, TOLD, Listening, WatchedAttend
from argosy.models.parts.weight import Leaves, merge, split
from argosy.parallel.scope import constrain, platform

# {kind: {name: [layers of that kind ...]}}.
Aux = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Layer:
    """One entry of the plan: the kind of block, and its other fixed settings."""

    kind: str
    each: Hashable = None


# What flows through the layers: one array [B T D], or a tree of them.
Streams = Any


class LayerBlock(Protocol):
    """One layer: `parts.block.Block`, or a block of a family. It returns the streams, its cache and its aux outputs (loads, losses)."""

    def holds(self, each: Any) -> Spec: ...

    def __call__(
        self, x: Streams, each: Any, cache: Cache | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Cache | None, dict[str, Array]]: ...


def constrain_streams(x: Streams) -> Streams:
    """The streams, laid out over the mesh in scope."""
    return jax.tree.map(lambda a: constrain(a, "B T D"), x)


def turns_of(module: Any, each: Any) -> Turns:
    """The rotary positions of a layer; none if it does not define `turns`."""
    return module.turns(each) if hasattr(module, "turns") else ()


def run_block(
    graph: Any,
    layer: Layer,
    weights: Leaves,
    x: Streams,
    cache: Cache | None,
    attend: Attend,
    remat: Remat,
    unrolled: bool = False,
    condition: Any = None,
) -> tuple[Streams, Cache | None, dict[str, Array]]:
    """One layer as a pure function of its weights."""

    def run(weights: Leaves, x: Streams, cache: Cache | None, attend: Attend, condition: Any) -> Any:
        heard = Listening(attend) if isinstance(attend, WatchedAttend) else None
        x, cache, aux = merge(graph, brought(weights))(x, layer.each, cache, heard or attend, condition)
        return constrain_streams(x), cache, aux | heard.told if heard else aux

    # A weight that was brought from the host must not be kept for the backward pass: all layers' would be.
    picks = remat == "none" and any_hosted(weights.values())
    again = on_picked_weights(run, remat) if picks else rematerialize(run, remat, unrolled)
    x, cache, aux = again(weights, x, cache, attend, condition)
    return x, cache, aux | {OUTPUT: x} if isinstance(attend, WatchedAttend) and attend.outputs else aux


@runtime_checkable
class Execution(Protocol):
    """How layers run. `stacked`: whether weights and caches are one array for all layers of a kind, or one per layer. `rounds`: in
    how many arrays the layers of a repeating group are stored, one after the other."""

    @property
    def stacked(self) -> bool: ...

    @property
    def remat(self) -> Remat: ...

    @property
    def rounds(self) -> int: ...

    def __call__(
        self, stack: "Stack", x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]: ...


@dataclass(frozen=True)
class Unroll:
    """Every layer is part of the program, one after the other."""

    remat: Remat = "none"
    stacked = False
    rounds = 1

    def __call__(
        self, stack: "Stack", x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]:
        new_caches, aux = {}, {}
        for i, layer in enumerate(stack.plan):
            name = str(i)
            # Split per layer, because layers of a kind may have different adapters.
            graph, weights = split(getattr(stack, name))
            cache = caches[name] if caches else None
            # Profiles name layers by these scopes.
            with jax.named_scope(f"layers.{i}"):
                x, new_caches[name], layer_aux = run_block(graph, layer, weights, x, cache, attend, self.remat, True, condition)
            aux.setdefault(layer.kind, []).append(layer_aux)
        return x, caches and new_caches, {kind: _stack_trees(trees) for kind, trees in aux.items()}


@dataclass(frozen=True)
class Scan:
    """lax.scan over the smallest repeating group of the plan; layers that do not repeat run as groups of one.

    Caches are in the carry, where XLA updates them in place. As inputs and outputs of the iterations they would be copied
    (459 MB of temporaries for 268 MB of cache in a decode step).
    """

    remat: Remat = "none"
    rounds: int = 1
    stacked = True

    def __call__(
        self, stack: "Stack", x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]:
        # For each cache, the number of its layers in earlier groups.
        first: Counter[str] = Counter()
        aux = []
        for group in stack.groups:
            graphs, leaves = group_parts(stack, group)
            names = [stack.cache_name(layer) for layer in group.layers]
            at = {name: jnp.asarray(first[name], jnp.int32) for name in dict.fromkeys(names)} if caches else {}
            with jax.named_scope("layers"):
                x, caches, group_aux = run_group(group, graphs, leaves, x, attend, self.remat, caches, names, at, condition=condition)
            aux.append(group_aux)
            for name in names:
                first[name] += group.repeats
        return x, caches, join_groups(aux)


def stored_as(decided: Mapping[str, Any]) -> Execution:
    """The layout of the layers of a run, from what its checkpoints say of it."""
    return Scan(rounds=decided.get("rounds", 1)) if decided["layers"] == "scan" else Unroll()


def group_parts(stack: "Stack", group: "LayerGroup") -> tuple[dict[str, Any], dict[str, Leaves]]:
    """The graphs and stored weights of a group of scanned layers, by kind."""
    apart = {kind: split(getattr(stack, name)) for kind, name in group.names.items()}
    return {kind: graph for kind, (graph, _) in apart.items()}, {kind: leaves for kind, (_, leaves) in apart.items()}


def run_group(
    group: "LayerGroup",
    graphs: Mapping[str, Any],
    leaves: Mapping[str, Leaves],
    x: Streams,
    attend: Attend,
    remat: Remat,
    caches: Caches | None = None,
    names: Sequence[str] = (),
    at: Mapping[str, Array] = MappingProxyType({}),
    marked: bool = False,
    condition: Any = None,
) -> tuple[Streams, Caches | None, Aux]:
    """The layers of a group, in a loop over its repeats.

    Args:
        graphs, leaves: structure and stored weights by kind.
        names: the name of each layer's cache.
        at: for each cache, the place of the group's first layer in it.
        marked: whether the inputs of layers carry a name for who recomputes them (`parts.stack.remat`).
    """
    uses = Counter(layer.kind for layer in group.layers)
    # A slice of several layers would be copied. Without caches there may be a backward pass, which sums gradients by repeats.
    single = {kind for kind in leaves if caches and uses[kind] > 1}
    weights = {kind: _by_repeat(kind_leaves, uses[kind]) for kind, kind_leaves in leaves.items() if kind not in single}

    def body(carry: Any, inputs: Any) -> Any:
        (x, caches, at), (repeat, weights) = carry, inputs
        caches = caches and dict(caches)
        seen: Counter[str] = Counter()
        at, aux_by_kind = dict(at), {}
        for i, layer in enumerate(group.layers):
            if layer.kind in single:
                mine = _layer(leaves[layer.kind], repeat * uses[layer.kind] + seen[layer.kind])
            else:
                mine = weights[layer.kind]
                mine = _entry(mine, seen[layer.kind]) if uses[layer.kind] > 1 else mine
            seen[layer.kind] += 1
            x = jax.tree.map(lambda a: checkpoint_name(a, INPUT), x) if marked else x
            run = partial(run_block, graphs[layer.kind], layer, mine, x, remat=remat, condition=condition)
            if caches:
                x, caches[names[i]], layer_aux = _with_cache(run, caches[names[i]], attend, at[names[i]])
                at[names[i]] = at[names[i]] + 1
            else:
                x, _, layer_aux = run(cache=None, attend=attend)
            aux_by_kind.setdefault(layer.kind, []).append(layer_aux)
        return (x, caches, at), {kind: _stack_trees(trees) for kind, trees in aux_by_kind.items()}

    carry = (x, caches, dict(at))
    if group.repeats == 1:
        (x, caches, _), aux = body(carry, (0, jax.tree.map(lambda a: a[0], weights)))
        return x, caches, aux
    (x, caches, _), aux = jax.lax.scan(body, carry, (jnp.arange(group.repeats), weights))
    return x, caches, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)


class LayerGroup(NamedTuple):
    """Consecutive layers that run as one loop: `layers`, repeated.

    names: for each kind, the stack's name for its weights.
    start: index of the first layer in the plan.
    round: which of the rounds of a longer group this is.
    """

    start: int
    layers: tuple[Layer, ...]
    repeats: int
    names: Mapping[str, str]
    round: int = 0

    def indexes(self, kind: str) -> tuple[int, ...]:
        """The indexes, in the plan, of this group's layers of a kind."""
        places = range(self.start, self.start + len(self.layers) * self.repeats)
        return tuple(i for i in places if self.layers[(i - self.start) % len(self.layers)].kind == kind)


def repeating(plan: Sequence[Any]) -> list[tuple[int, int, int]]:
    """The plan as (start, period, repeats): at each point the repetition that covers the most layers, with the shortest period."""
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


def groups_of(plan: Sequence[Layer], rounds: int = 1) -> tuple[LayerGroup, ...]:
    """The loops of a plan. Groups whose repeats divide by `rounds` are cut into so many. The weights of the first loop with a kind have
    the kind's name, those of later ones "kind_2" and so on."""
    out, times = [], Counter()
    for start, period, repeats in repeating(plan):
        layers = tuple(plan[start : start + period])
        kinds = tuple(dict.fromkeys(layer.kind for layer in layers))
        parts = 1 if repeats % rounds else rounds
        for part in range(parts):
            times.update(kinds)
            names = {kind: kind if times[kind] == 1 else f"{kind}_{times[kind]}" for kind in kinds}
            out.append(LayerGroup(start + part * period * repeats // parts, layers, repeats // parts, names, part))
    return tuple(out)


class Stack(nnx.Module):
    """The layers of a model.

    Args:
        plan: the layers in order.
        make: builds a block of a kind.
        run: how they run, and so their layout in memory.
    """

    def __init__(self, plan: Sequence[Layer], make: Callable[[str], Any], *, run: Execution | None = None):
        self.plan, self.run = tuple(plan), (run := run or Unroll())
        self.kinds = tuple(dict.fromkeys(layer.kind for layer in self.plan))
        if invalid := [kind for kind in self.kinds if kind.isdigit() or hasattr(self, kind)]:
            raise ValueError(f"kinds of layers cannot be named {invalid}")
        if run.stacked:
            for name, (kind, indexes) in self.stored().items():
                setattr(self, name, _deepened(make(kind), len(indexes)))
        else:
            for i, layer in enumerate(self.plan):
                setattr(self, str(i), make(layer.kind))

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return groups_of(self.plan, self.run.rounds)

    def stored(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """For scanned layers: {name of the stored block: (kind, indexes of its layers in the plan)}."""
        return {
            name: (kind, group.indexes(kind)) for group in self.groups for kind, name in group.names.items()
        }

    def indexes(self) -> dict[str, tuple[int, ...]]:
        """The indexes of the layers of each kind."""
        return {kind: tuple(i for i, layer in enumerate(self.plan) if layer.kind == kind) for kind in self.kinds}

    def example(self, layer: Layer) -> Any:
        """A block of this layer's kind, from which its cache can be read off."""
        return getattr(self, layer.kind if self.run.stacked else str(self.plan.index(layer)))

    def cache_name(self, layer: Layer) -> str:
        """The name of a layer's cache. Layers of one kind share an array if they attend equally far back."""
        span = self.example(layer).holds(layer.each).span
        return layer.kind if span is None else f"{layer.kind}.{span}"

    def cache_places(self) -> list[tuple[str, int]]:
        """For each layer: the cache that scanned layers keep it in, and its place there."""
        seen: Counter[str] = Counter()
        out = []
        for layer in self.plan:
            name = self.cache_name(layer)
            out.append((name, seen[name]))
            seen[name] += 1
        return out

    def holds(self) -> Specs:
        """What the caller must allocate: {cache name: (the cache of one layer, number of layers in the array, or None)}."""
        if not self.run.stacked:
            return {str(i): (self.example(layer).holds(layer.each), None) for i, layer in enumerate(self.plan)}
        out: dict[str, tuple[Spec, int | None]] = {}
        for layer in self.plan:
            name = self.cache_name(layer)
            out[name] = (self.example(layer).holds(layer.each), (out.get(name, (None, 0))[1] or 0) + 1)
        return out

    def __call__(
        self,
        x: Streams,
        caches: Caches | None,
        attend: Attend,
        condition: Any = None,
        *,
        positions: Int[Array, "B T A"] | None = None,
    ) -> tuple[Streams, Caches | None, Aux]:
        """Runs the layers.

        Args:
            x: [B T D], or a tree of such arrays.
            condition: handed to every block; a tree of arrays [B ...].
            positions: rotary positions with several axes, in place of those of the strategy.
        """
        return self.run(self, constrain_streams(x), caches, self.with_angles(attend, positions), condition)

    def layer_aux(self, aux: Aux) -> tuple[list[dict[str, Array]], Aux]:
        """What every layer of the plan told (`parts.stack.watch`), and the other aux outputs."""
        places, by_layer = self.indexes(), dict[int, dict[str, Array]]()
        for kind, arrays in aux.items():
            for place, i in enumerate(places[kind]):
                by_layer[i] = {name: _entry(a, place) for name, a in arrays.items() if name.startswith(TOLD)}
        rest = {kind: {name: a for name, a in arrays.items() if not name.startswith(TOLD)} for kind, arrays in aux.items()}
        return [by_layer[i] for i in range(len(self.plan))], rest

    def rotary_axes(self) -> set[int]:
        """Numbers of axes, besides one, that rotary positions of all layers may have; empty if none."""
        axes = [set() if rope.sections is None else {len(rope.sections)} for rope, _ in self._turns()]
        return set.intersection(*axes) if axes else set()

    def _turns(self) -> dict[Any, None]:
        return dict.fromkeys(t for layer in dict.fromkeys(self.plan) for t in turns_of(self.example(layer), layer.each))

    def with_angles(self, attend: Attend, positions: Int[Array, "B T A"] | None = None) -> Attend:
        """The strategy with the angles of its tokens, for all rotary positions that layers of the plan use.

        Raises:
            ValueError: positions with several axes, for layers or a strategy that cannot take them.
        """
        turns = self._turns()
        if not turns or not is_dataclass(attend):
            if positions is not None:
                raise ValueError("these layers have no rotary positions that could have several axes")
            return attend
        at = attend.positions if positions is None else positions
        return replace(attend, angles={rope.key(size): angles(at, rope, size) for rope, size in turns})


def unrolled_model(model: Any) -> Any:
    """The model with a list of layers where it has scanned ones. Weights of these layers are descriptions, named as `to_layers`
    names them; the others are shared with the model, which stays as it is."""
    out = nnx.merge(*nnx.split(model))
    for _, stack in [*nnx.iter_modules(out)]:
        if not isinstance(stack, Stack) or not stack.run.stacked:
            continue
        for name, (_, indexes) in stack.stored().items():
            graph, leaves = split(getattr(stack, name))
            layer = {address: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for address, a in leaves.items()}
            delattr(stack, name)
            for i in indexes:
                setattr(stack, str(i), merge(graph, layer))
        stack.run = Unroll(stack.run.remat)
    return out


def _deepened(module: Any, layers: int) -> Any:
    """The module with every weight described for `layers` layers."""
    _, state = nnx.split(module)
    for path, v in nnx.to_flat_state(state):
        node = module
        for name in path[:-1]:
            node = getattr(node, str(name))
        getattr(node, str(path[-1])).set_value(jax.ShapeDtypeStruct((layers, *v.shape), v.dtype))
    return module


def _by_repeat(tree: Any, uses: int) -> Any:
    """Stacked weights with one leading axis for the repeats of a group, and one for the layers of a repeat where there are several.

    An axis of one is not added: XLA:CPU lays it out elsewhere, and copies the weights of all layers before the loop (SmolLM2 135M:
    424 MB a decode step, 60 % of its time).
    """
    return tree if uses == 1 else jax.tree.map(lambda a: a.reshape(-1, uses, *a.shape[1:]), tree)


def _entry(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _layer(tree: Any, at: Array | int) -> Any:
    """One layer of stacked arrays."""
    return jax.tree.map(lambda a: dynamic_index_in_dim(a, at, keepdims=False), tree)


def _with_cache(run: Callable[..., Any], stacked: Cache, attend: Attend, at: Array) -> tuple[Streams, Cache, dict[str, Array]]:
    """A layer's results, and the stacked cache with what it wrote.

    Args:
        run: (cache, attend) -> what `run_block` returns.
        at: the layer's place in the stack.
    """
    # XLA for CPUs has no kernel that needs a layer apart, and lays out joined layers with one key head anew in every layer.
    if platform() != "cpu" and isinstance(attend, StackedAttend):
        x, cache, aux = run(cache=joined_layers(stacked), attend=attend.in_stack(stacked, at))
        return x, parted_layers(cache, len(jax.tree.leaves(stacked)[0])), aux
    x, cache, aux = run(cache=_layer(stacked, at), attend=attend)
    return x, jax.tree.map(lambda a, new: dynamic_update_index_in_dim(a, new, at, 0), stacked, cache), aux


def _stack_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def join_groups(parts: list[Any]) -> Any:
    """The outputs of the groups, one after the other."""
    out: dict[str, list[Any]] = {}
    for part in parts:
        for name, tree in part.items():
            out.setdefault(name, []).append(tree)
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *trees) for name, trees in out.items()}
