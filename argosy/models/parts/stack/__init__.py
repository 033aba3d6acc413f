"""The plan of a model's layers, and the strategies that run the layers.

A plan lists the layers as `Layer(kind, each)`. Layers of one kind have weights of the same structure. `each` holds the other fixed
settings of a layer, such as a window or a rope base. The strategy is set from outside and decides the layout of weights in memory:

    Unroll    one array per layer, "layers.3.attn.q.w": 15 to 25 % faster in training on CPUs, and faster for shallow models
    Scan      one array for the layers of a kind, "layers.block.attn.q.w" [L ...]: compile time does not grow with depth; for TPUs

Scan runs the smallest repeating group of the plan in a loop, and the remaining layers as further groups. Each group has its own
arrays, because a slice of a longer array would copy the weights in every step. For example, Gemma 3 1B has four groups of six layers,
and the last two layers are in "layers.block_2.attn.q.w" [2 ...].

In any layout, weights also have per-layer names, such as "layers.3.attn.q.w" (`addresses`). Hub tables, checkpoints of the other
layout and initialization use these.

The layers transform streams: one array [B T D], or a pytree of such arrays, such as one for image and one for text. Every block also
gets the `condition` of the call, a pytree of arrays whose leading axis is the batch. Examples are an embedding of the time step and
the memory of an encoder.
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

# Aux outputs: {kind of layer: {name: array [layers of that kind ...]}}.
Aux = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Layer:
    """One entry of the plan.

    kind: the kind of block. Layers of one kind have weights of the same structure.
    each: the other fixed settings of the layer.
    """

    kind: str
    each: Hashable = None


# The data that layers transform: one array [B T D], or a pytree of such arrays.
Streams = Any


class LayerBlock(Protocol):
    """The interface of one layer: `parts.block.Block`, or a block of a family.

    A call returns the streams, the layer's cache and the layer's aux outputs, such as expert loads and losses.
    """

    def holds(self, each: Any) -> Spec: ...

    def __call__(
        self, x: Streams, each: Any, cache: Cache | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Cache | None, dict[str, Array]]: ...


def constrain_streams(x: Streams) -> Streams:
    """Constrains the sharding of the streams over the mesh in scope."""
    return jax.tree.map(lambda a: constrain(a, "B T D"), x)


def turns_of(module: Any, each: Any) -> Turns:
    """The rotary positions of a layer. Empty if the layer does not define `turns`."""
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
    """Runs one layer as a pure function of its weights. Returns the streams, the layer's cache and its aux outputs.

    Args:
        graph: the structure of the layer, from `split`.
        unrolled: whether the layer is in a program with other layers, not in a loop's body.
    """

    def run(weights: Leaves, x: Streams, cache: Cache | None, attend: Attend, condition: Any) -> Any:
        heard = Listening(attend) if isinstance(attend, WatchedAttend) else None
        x, cache, aux = merge(graph, brought(weights))(x, layer.each, cache, heard or attend, condition)
        return constrain_streams(x), cache, aux | heard.told if heard else aux

    # A weight that was copied from the host must not be kept for the backward pass: the device would hold all layers' weights.
    picks = remat == "none" and any_hosted(weights.values())
    again = on_picked_weights(run, remat) if picks else rematerialize(run, remat, unrolled)
    x, cache, aux = again(weights, x, cache, attend, condition)
    return x, cache, aux | {OUTPUT: x} if isinstance(attend, WatchedAttend) and attend.outputs else aux


@runtime_checkable
class Execution(Protocol):
    """The interface of strategies that run layers.

    stacked: whether weights and caches are one array for all layers of a kind. Otherwise each layer has its own.
    remat: as in `parts.stack.remat`.
    rounds: the number of arrays that the layers of a repeating group are stored in.
    """

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
    """Compiles every layer into the program, one after the other."""

    remat: Remat = "none"
    stacked = False
    rounds = 1

    def __call__(
        self, stack: "Stack", x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]:
        new_caches, aux = {}, {}
        for i, layer in enumerate(stack.plan):
            name = str(i)
            # Each layer is split by itself, because layers of a kind may have different adapters.
            graph, weights = split(getattr(stack, name))
            cache = caches[name] if caches else None
            # Profiles show layers by the names of these scopes.
            with jax.named_scope(f"layers.{i}"):
                x, new_caches[name], layer_aux = run_block(graph, layer, weights, x, cache, attend, self.remat, True, condition)
            aux.setdefault(layer.kind, []).append(layer_aux)
        return x, caches and new_caches, {kind: _stack_trees(trees) for kind, trees in aux.items()}


@dataclass(frozen=True)
class Scan:
    """Runs the smallest repeating group of the plan in a lax.scan. Layers that do not repeat run as groups of one.

    Caches are in the carry of the scan, where XLA updates them in place. As inputs and outputs of the iterations they would be copied
    (459 MB of temporaries for 268 MB of cache in a decode step).
    """

    remat: Remat = "none"
    rounds: int = 1
    stacked = True

    def __call__(
        self, stack: "Stack", x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]:
        # For each cache, the number of layers in earlier groups that use it.
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
    """Returns the strategy whose layout a run's checkpoints have. `decided` are the values that were saved with the checkpoints."""
    return Scan(rounds=decided.get("rounds", 1)) if decided["layers"] == "scan" else Unroll()


def group_parts(stack: "Stack", group: "LayerGroup") -> tuple[dict[str, Any], dict[str, Leaves]]:
    """Returns the graphs and the stored weights of a group of scanned layers, each by kind."""
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
    """Runs the layers of a group, in a loop over the group's repeats.

    Args:
        graphs, leaves: the structure and the stored weights of the layers, by kind.
        names: the name of each layer's cache.
        at: for each cache, the index of the group's first layer in that cache.
        marked: whether the inputs of layers get the checkpoint name `remat.INPUT`, so that an outer rematerialization can keep them.
    """
    uses = Counter(layer.kind for layer in group.layers)
    # With caches, layers are read one by one, because a slice of several layers would be copied. Without caches there may be a backward
    # pass, which sums gradients by repeats.
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
    """Consecutive layers of the plan that run as one loop.

    start: the index of the first layer in the plan.
    layers: the layers of one repeat.
    repeats: how often `layers` is repeated.
    names: for each kind, the name that its weights have in the stack.
    round: the index of this group among the rounds of a longer group.
    """

    start: int
    layers: tuple[Layer, ...]
    repeats: int
    names: Mapping[str, str]
    round: int = 0

    def indexes(self, kind: str) -> tuple[int, ...]:
        """Returns the indexes, in the plan, of this group's layers of a kind."""
        places = range(self.start, self.start + len(self.layers) * self.repeats)
        return tuple(i for i in places if self.layers[(i - self.start) % len(self.layers)].kind == kind)


def repeating(plan: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Divides a plan into repetitions (start, period, repeats). From each start, takes the repetition that covers the most layers, and
    of several the one with the shortest period."""
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
    """Divides a plan into the groups that run as loops.

    A group is cut into `rounds` groups if its repeats divide by `rounds`. The weights of the first group with a kind are named as the
    kind. Layers of later groups are named "kind_2" and so on.
    """
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
        plan: the layers, in order.
        make: builds a block of a kind.
        run: the strategy that runs the layers and decides their layout in memory. Default: `Unroll`.
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
        """Returns, for scanned layers, {name of the stored block: (kind, indexes of the block's layers in the plan)}."""
        return {
            name: (kind, group.indexes(kind)) for group in self.groups for kind, name in group.names.items()
        }

    def indexes(self) -> dict[str, tuple[int, ...]]:
        """Returns the indexes, in the plan, of the layers of each kind."""
        return {kind: tuple(i for i, layer in enumerate(self.plan) if layer.kind == kind) for kind in self.kinds}

    def example(self, layer: Layer) -> Any:
        """Returns a block of this layer's kind, for example to ask what the layer caches."""
        return getattr(self, layer.kind if self.run.stacked else str(self.plan.index(layer)))

    def cache_name(self, layer: Layer) -> str:
        """Returns the name of a layer's cache. Scanned layers of one kind share a cache if they attend equally far back."""
        span = self.example(layer).holds(layer.each).span
        return layer.kind if span is None else f"{layer.kind}.{span}"

    def cache_places(self) -> list[tuple[str, int]]:
        """Returns, for each layer, the name of its cache if layers are scanned, and the layer's index in that cache."""
        seen: Counter[str] = Counter()
        out = []
        for layer in self.plan:
            name = self.cache_name(layer)
            out.append((name, seen[name]))
            seen[name] += 1
        return out

    def holds(self) -> Specs:
        """Returns the caches that the caller must allocate: {cache name: (spec of one layer, number of layers in the arrays)}. The
        number is None if layers are unrolled."""
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
            x: the streams, one array [B T D] or a pytree of such arrays.
            condition: a pytree of arrays [B ...] that every block gets.
            positions: rotary positions with several axes. None: the positions of the strategy.
        """
        return self.run(self, constrain_streams(x), caches, self.with_angles(attend, positions), condition)

    def layer_aux(self, aux: Aux) -> tuple[list[dict[str, Array]], Aux]:
        """Splits aux outputs into recorded values (`parts.stack.watch`), one dict for each layer of the plan, and the others."""
        places, by_layer = self.indexes(), dict[int, dict[str, Array]]()
        for kind, arrays in aux.items():
            for place, i in enumerate(places[kind]):
                by_layer[i] = {name: _entry(a, place) for name, a in arrays.items() if name.startswith(TOLD)}
        rest = {kind: {name: a for name, a in arrays.items() if not name.startswith(TOLD)} for kind, arrays in aux.items()}
        return [by_layer[i] for i in range(len(self.plan))], rest

    def rotary_axes(self) -> set[int]:
        """Returns the numbers of axes, other than one, that rotary positions may have in every layer. Empty if there are none."""
        axes = [set() if rope.sections is None else {len(rope.sections)} for rope, _ in self._turns()]
        return set.intersection(*axes) if axes else set()

    def _turns(self) -> dict[Any, None]:
        return dict.fromkeys(t for layer in dict.fromkeys(self.plan) for t in turns_of(self.example(layer), layer.each))

    def with_angles(self, attend: Attend, positions: Int[Array, "B T A"] | None = None) -> Attend:
        """Returns a copy of `attend` that holds the rotary angles of its tokens. There is one set of angles for each kind of RoPE in
        the layers of this stack.

        Raises:
            ValueError: `positions` are given, but the layers or the strategy cannot take them.
        """
        turns = self._turns()
        if not turns or not is_dataclass(attend):
            if positions is not None:
                raise ValueError("these layers have no rotary positions that could have several axes")
            return attend
        at = attend.positions if positions is None else positions
        return replace(attend, angles={rope.key(size): angles(at, rope, size) for rope, size in turns})


def unrolled_model(model: Any) -> Any:
    """Returns the model with unrolled layers instead of scanned layers. The model itself is unchanged.

    The weights of these layers are descriptions, named as in `to_layers`. All other weights are shared with the model.
    """
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
    """Replaces every weight of a module by a description with a leading axis of `layers` layers, in place. Returns the module."""
    _, state = nnx.split(module)
    for path, v in nnx.to_flat_state(state):
        node = module
        for name in path[:-1]:
            node = getattr(node, str(name))
        getattr(node, str(path[-1])).set_value(jax.ShapeDtypeStruct((layers, *v.shape), v.dtype))
    return module


def _by_repeat(tree: Any, uses: int) -> Any:
    """Splits the leading axis of stacked weights into repeats of a group, and layers of this kind in one repeat.

    If a repeat has one layer of the kind, no axis of size 1 is added. XLA:CPU would change the layout for that axis and copy the
    weights of all layers before the loop (SmolLM2 135M: 424 MB in a decode step, 60 % of the step's time).
    """
    return tree if uses == 1 else jax.tree.map(lambda a: a.reshape(-1, uses, *a.shape[1:]), tree)


def _entry(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _layer(tree: Any, at: Array | int) -> Any:
    """Returns one layer of stacked arrays."""
    return jax.tree.map(lambda a: dynamic_index_in_dim(a, at, keepdims=False), tree)


def _with_cache(run: Callable[..., Any], stacked: Cache, attend: Attend, at: Array) -> tuple[Streams, Cache, dict[str, Array]]:
    """Runs one layer on a stacked cache. Returns the streams, the stacked cache with the layer's changes, and the aux outputs.

    Args:
        run: a function (cache, attend) that returns what `run_block` returns.
        at: the layer's index in the stacked cache.
    """
    # Joined layers are for kernels that read one layer's pages in place. XLA:CPU has no such kernel, and with one key head it would
    # change the layout of joined layers in every layer.
    if platform() != "cpu" and isinstance(attend, StackedAttend):
        x, cache, aux = run(cache=joined_layers(stacked), attend=attend.in_stack(stacked, at))
        return x, parted_layers(cache, len(jax.tree.leaves(stacked)[0])), aux
    x, cache, aux = run(cache=_layer(stacked, at), attend=attend)
    return x, jax.tree.map(lambda a, new: dynamic_update_index_in_dim(a, new, at, 0), stacked, cache), aux


def _stack_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def join_groups(parts: list[Any]) -> Any:
    """Concatenates the aux outputs of several groups of layers. Outputs of the same kind of layer are concatenated along the layer
    axis."""
    out: dict[str, list[Any]] = {}
    for part in parts:
        for name, tree in part.items():
            out.setdefault(name, []).append(tree)
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *trees) for name, trees in out.items()}
