"""Keeps the optimizer's state, and optionally the weights of layers, in the host's memory. For the update they are brought to the
device piece by piece, and written back in place.

XLA fetches whole arrays as early as it can. With a single update of all weights, a step compiled for a TPU v5e held more temporaries
than the size of the state (4.1 GB for 1.9 GB). So each weight has a loop over its layers, whose body fetches, updates and writes back
the state of one layer. The loop carries the arrays of the host, which XLA then changes in place. Large weights outside layers
(embeddings, a head) are updated in pieces if the optimizer is elementwise. All other weights are fetched whole.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from argosy.models.parts.stack.hosted import Space, on_host

# The kind of memory where the state lies.
HOST = "pinned_host"
# Bytes of a piece of a weight that is not in layers, and what the rows of one are a multiple of: TPUs store rows by eights. They cannot
# update slices of the host's arrays along the last axis.
PIECE = 32 << 20
ROWS = 8

# The pieces that a weight is updated in: {address: (axis, how many)}. A weight without an entry is updated whole.
Pieces = Mapping[str, tuple[int, int]]


def state_on_host(rule_of: Callable[[Collection[str]], Any], weights: Collection[str], pieces: Pieces) -> Any:
    """Makes an Optax transformation whose state of each weight is in the host's memory. Scalars, such as counts of updates, stay on the
    device.

    Its update takes a bool `stays`. If it is True, the state stays as it is, bit for bit. To choose between the old and the new state
    after the update would fetch both.

    Args:
        rule_of: (parameter names) -> the Optax transformation over the weights of these names, `{name: array}`. It must treat each
            weight, and each piece of a weight, alone.
        weights: the names of all trained parameters.
        pieces: the axis and the number of pieces of each weight that is updated in pieces (`pieces_for`).
    """
    rules = {address: rule_of([address]) for address in weights}

    def init(params: Any) -> Any:
        def place(path: Any, leaf: Any) -> Any:
            return leaf if _weight_of(path, leaf, weights) is None else jax.device_put(leaf, Space.Host)

        return jax.tree_util.tree_map_with_path(place, rule_of(weights).init(params))

    def update(updates: Any, state: Any, params: Any = None, *, stays: Any = None, **_: Any) -> Any:
        if params is None or stays is None:
            raise TypeError("the update of state on the host needs `params` and `stays`")
        leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        old = dict(leaves)
        new, new_updates = dict(old), {}
        for address, gradient in updates.items():
            # The containers of a weight's own state are those of all, with one address.
            entries, form = jax.tree_util.tree_flatten_with_path(jax.eval_shape(rules[address].init, {address: params[address]}))
            turn = _Turn(rules[address], address, [path for path, _ in entries], form, old, weights, stays)
            arrays = [old[path] for path in turn.inside]
            if on_host(params[address]):
                new_updates[address], arrays, numbers = _in_place(turn, gradient, arrays, params[address], *pieces[address])
            elif address in pieces:
                new_updates[address], arrays, numbers = _in_pieces(turn, gradient, arrays, params[address], *pieces[address])
            else:
                new_updates[address], arrays, numbers = turn(gradient, arrays, params[address])
            new |= dict(zip(turn.inside, arrays)) | dict(zip(turn.beside, numbers))
        return new_updates, jax.tree.unflatten(tree, [new[path] for path, _ in leaves])

    return optax.GradientTransformationExtraArgs(init, update)


class _Turn:
    """The update of one weight, or of a piece of it.

    inside: the paths of the arrays of its state, which are on the host.
    beside: the paths of the scalars of its state.
    """

    def __init__(self, rule: Any, address: str, paths: list[Any], form: Any, old: Any, weights: Collection[str], stays: Any):
        self.rule, self.address, self.paths, self.form, self.old, self.stays = rule, address, paths, form, old, stays
        self.inside = [path for path in paths if _weight_of(path, old[path], weights) is not None]
        self.beside = [path for path in paths if path not in self.inside]

    def __call__(self, gradient: Any, arrays: list[Any], param: Any) -> tuple[Any, list[Any], list[Any]]:
        """Computes the update. Returns it, the new arrays of the state, which are on the host, and the new scalars of the state."""
        before = self.old | {path: jax.device_put(a, Space.Device) for path, a in zip(self.inside, arrays)}
        state = jax.tree.unflatten(self.form, [before[path] for path in self.paths])
        new_updates, state = self.rule.update({self.address: gradient}, state, {self.address: param})
        after = {path: jnp.where(self.stays, before[path], leaf) for path, leaf in zip(self.paths, jax.tree.leaves(state))}
        host_arrays = [jax.device_put(after[path], Space.Host) for path in self.inside]
        return new_updates[self.address], host_arrays, [after[path] for path in self.beside]


def _in_pieces(turn: _Turn, gradient: Any, arrays: list[Any], param: Any, axis: int, count: int) -> Any:
    """Applies `turn` to one piece of a weight after the other. Each update overwrites the piece of the gradient, and each piece of the
    state is overwritten with the new one."""
    size = gradient.shape[axis] // count

    def update_piece(carry: Any, i: Any) -> Any:
        gradient, arrays = carry
        cut = [jax.lax.dynamic_slice_in_dim(a, i * size, size, axis) for a in (gradient, param, *arrays)]
        new_updates, new_arrays, numbers = turn(cut[0], cut[2:], cut[1])
        pairs = zip((gradient, *arrays), (new_updates, *new_arrays))
        new = [jax.lax.dynamic_update_slice_in_dim(a, b, i * size, axis) for a, b in pairs]
        return (new[0], new[1:]), numbers

    (new_updates, arrays), numbers = jax.lax.scan(update_piece, (gradient, arrays), jnp.arange(count, dtype=jnp.int32))
    return new_updates, arrays, [each[-1] for each in numbers]


def _in_place(turn: _Turn, gradient: Any, arrays: list[Any], param: Any, axis: int, count: int) -> Any:
    """Applies `turn` as `_in_pieces` does, for a weight in the host's memory. The pieces of the weight are updated there, and the new
    weight is returned instead of an update."""
    size = gradient.shape[axis] // count

    def update_piece(carry: Any, i: Any) -> Any:
        cut = [jax.lax.dynamic_slice_in_dim(a, i * size, size, axis) for a in (gradient, *carry)]
        before = jax.device_put(cut[1], Space.Device)
        new_updates, new_arrays, numbers = turn(cut[0], cut[2:], before)
        updated: Any = optax.apply_updates(before, new_updates)
        after = jnp.where(turn.stays, before, updated)
        new = [jax.device_put(after, Space.Host), *new_arrays]
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, b, i * size, axis) for a, b in zip(carry, new)), numbers

    (param, *arrays), numbers = jax.lax.scan(update_piece, (param, *arrays), jnp.arange(count, dtype=jnp.int32))
    return param, arrays, [each[-1] for each in numbers]


def pieces_for(optimizer: Any, meanings: Any, shapes: Mapping[str, Any], places: Mapping[str, NamedSharding]) -> Pieces:
    """Divides weights into pieces. The pieces of stacked weights are their layers. Other large weights are cut along an axis into
    pieces of limited size.

    Args:
        optimizer: the settings of the optimizer (`train.optimizers`), which know the weights that may be cut.
        meanings: the meanings of the trained weights (`train.state.meanings_of`).
        shapes: the shapes of the weights, by parameter name.
        places: the shardings of the weights. Neither the last axis nor an axis that the mesh splits is cut. A weight without another
            axis is updated whole.

    Returns:
        The axis and the number of pieces, by parameter name.
    """
    stacked = stacked_among(meanings)
    pieces = {address: (0, shapes[address].shape[0]) for address in stacked}
    for address in optimizer.apart(meanings) - stacked:
        shape, spec = shapes[address].shape, places[address].spec
        need = math.ceil(math.prod(shape) * shapes[address].dtype.itemsize / PIECE)
        cuts = []
        for axis, size in enumerate(shape[:-1]):
            counts = [n for n in range(need, size // ROWS + 1) if size % (n * ROWS) == 0]
            if counts and (axis >= len(spec) or spec[axis] is None):
                cuts.append((counts[0], axis))
        if need > 1 and cuts:
            count, axis = min(cuts)
            pieces[address] = axis, count
    return pieces


def weights_on_host(places: Mapping[str, NamedSharding], meanings: Any) -> dict[str, NamedSharding]:
    """Returns the shardings of the trained weights, with the weights of stacked layers in the host's memory.

    Args:
        places: the shardings of the weights on devices, by parameter name.
        meanings: the meanings of the trained weights (`train.state.meanings_of`).
    """
    stacked = stacked_among(meanings)
    return {a: place.with_memory_kind(HOST) if a in stacked else place for a, place in places.items()}


def stacked_among(meanings: Any) -> frozenset[str]:
    """Returns the names of the weights that are stored as one array for several layers."""
    return frozenset(address for address, (meaning, stored) in meanings.items() if stored > len(meaning.letters))


def places_on_host(places: Any, shapes: Any, weights: Collection[str]) -> Any:
    """Returns the shardings of an optimizer's state whose arrays are in the host's memory.

    Args:
        places: the shardings of the state on devices.
        shapes: the shapes of the state.
        weights: the names of the trained parameters.
    """

    def place(path: Any, shape: Any, place: Any) -> Any:
        return place if _weight_of(path, shape, weights) is None else place.with_memory_kind(HOST)

    return jax.tree_util.tree_map_with_path(place, shapes, places)


def _weight_of(path: Any, leaf: Any, weights: Collection[str]) -> str | None:
    """Returns the name of the weight that a leaf of the state belongs to; None for scalars and for leaves of no single weight."""
    keys = (k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey))
    return next((k for k in keys if k in weights), None) if leaf.ndim else None
