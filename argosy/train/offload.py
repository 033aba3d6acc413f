"""The optimizer's state in the host's memory: brought to the device for the update, layer by layer, and written back.

XLA brings the state of whole weights as early as it can: without a loop, a step for a described TPU v5e held more temporaries than the
state takes (4.1 GB for 1.9 GB). So the rule of the optimizer is traced for one layer and taken apart by weights, and the part of a weight
runs in a loop over its layers: a loop's body fetches, updates and writes back one layer. What is not in layers (embeddings, a head, norms
at the end, layers that are not stacked) is fetched whole.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

Space = jax.memory.Space
# The kind of memory where the state lies.
HOST = "pinned_host"


def hosted(rule: Any, stacked: frozenset[str]) -> Any:
    """A rule (`Optimizer.rule`) with the state that it has of each weight in the host's memory. Numbers stay what they are.

    Args:
        rule: an Optax transformation over flat `{address: array}` weights, that treats each weight and each of its layers alone.
        stacked: the addresses of weights with a leading axis for layers.
    """
    import optax

    def init(params: Any) -> Any:
        def place(path: Any, leaf: Any) -> Any:
            return leaf if _weight_of(path, leaf, params) is None else jax.device_put(leaf, Space.Host)

        return jax.tree_util.tree_map_with_path(place, rule.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return _in_turn(rule.update, (updates, state, params), stacked)

    return optax.GradientTransformation(init, update)


def places_on_host(places: Any, shapes: Any, weights: Collection[str]) -> Any:
    """The shardings of an optimizer's state that is in the host's memory. weights: the addresses of what is trained."""

    def place(path: Any, shape: Any, place: Any) -> Any:
        return place if _weight_of(path, shape, weights) is None else place.with_memory_kind(HOST)

    return jax.tree_util.tree_map_with_path(place, shapes, places)


def _weight_of(path: Any, leaf: Any, weights: Collection[str]) -> str | None:
    """The address of the weight that a leaf belongs to; None for scalars and for what is of no single weight."""
    keys = (k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey))
    return next((k for k in keys if k in weights), None) if leaf.ndim else None


def _in_turn(update: Callable[..., Any], given: Any, stacked: frozenset[str]) -> Any:
    """`update(*given)`, weight by weight; the state in `given` and the new one are on the host."""
    leaves = jax.tree_util.tree_flatten_with_path(given)[0]
    of = [_weight_of(path, leaf, given[0]) for path, leaf in leaves]
    one = [
        jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if address in stacked else leaf.shape, leaf.dtype)
        for address, (_, leaf) in zip(of, leaves)
    ]
    closed, shape = jax.make_jaxpr(update, return_shape=True)(*jax.tree.unflatten(jax.tree.structure(given), one))
    jaxpr, out_shape = closed.jaxpr, jax.tree.structure(shape)
    values = dict(zip(jaxpr.constvars, closed.consts)) | {v: leaf for v, (_, leaf) in zip(jaxpr.invars, leaves)}
    owner: dict[Any, str | None] = dict.fromkeys(jaxpr.constvars) | dict(zip(jaxpr.invars, of))
    turns: dict[str | None, list[Any]] = {None: []} | {address: [] for address in of if address is not None}
    for eqn in jaxpr.eqns:
        read = {owner[v] for v in eqn.invars if not isinstance(v, Literal)} - {None}
        if len(read) > 1:
            raise ValueError(f"the rule of the optimizer mixes weights: {sorted(map(str, read))}")
        address = next(iter(read), None)
        owner |= dict.fromkeys(eqn.outvars, address)
        turns[address].append(eqn)
    from_host = {v for v, (path, _) in zip(jaxpr.invars, leaves) if path[0].idx == 1 and owner[v] is not None}
    new = jax.tree_util.tree_flatten_with_path(shape[1])[0]
    to_host = {v for v, (path, leaf) in zip(jaxpr.outvars[-len(new) :], new) if _weight_of(path, leaf, given[0]) is not None}
    for address, eqns in turns.items():
        own = [v for v in jaxpr.invars if owner[v] == address] if address is not None else []
        made = [v for v in dict.fromkeys(jaxpr.outvars) if not isinstance(v, Literal) and owner[v] == address]
        if address is None:
            made = [v for eqn in eqns for v in eqn.outvars]
        read = [v for v in dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))]
        shared = [v for v in read if owner[v] != address or (address is None and v in values)]
        body = jaxpr_as_fun(ClosedJaxpr(Jaxpr((), [*shared, *own], made, eqns), ()))

        def part(arrays: Any, shared: Any = shared, own: Any = own, made: Any = made, body: Any = body, layer: bool = False) -> Any:
            here = [jax.device_put(a, Space.Device) if v in from_host else a for v, a in zip(own, arrays)]
            found = body(*(values[v] for v in shared), *([a[None] for a in here] if layer else here))
            found = [a[0] for a in found] if layer else found
            return [jax.device_put(a, Space.Host) if v in to_host else a for v, a in zip(made, found)]

        arrays = [values[v] for v in own]
        if address not in stacked:
            found = part(arrays)
        else:
            _, found = jax.lax.scan(lambda _, each, part=part: (None, part(each, layer=True)), None, arrays)
        values |= zip(made, found)
    return jax.tree.unflatten(out_shape, [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars])
