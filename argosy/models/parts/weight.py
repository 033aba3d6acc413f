"""The weights of a model: their descriptions, names and initialization.

A new model has no arrays. Its weights are descriptions: a shape, the letters of the axes, and how to initialize the weight. Building a
model of any size therefore takes milliseconds, planning needs no memory, and loading initializes nothing that it overwrites. `fill`
initializes the weights that a checkpoint lacks.

Every weight has an address, which is its dotted path: "layers.3.attn.q.w". Outside the model, weights are a flat dict
`{address: array}`. Optimizers, checkpoints, name tables and sharding rules use that form. How layers are stacked in memory
(`parts.stack`) changes the address and the leading axes, never the letters.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from argosy.core.dims import LOOKED_UP, Legend, named_axes

# Models with at most this many parameters are initialized as rows of equal length (`_draw_rows`).
SMALL = 1 << 26
# The most bytes of weights that one program initializes, unless a single weight has more.
AT_ONCE = 1 << 30

# Weights by address: {address: array or jax.ShapeDtypeStruct}.
Leaves = dict[str, Any]


class Draw(NamedTuple):
    """How a weight is initialized.

    kind: "normal" or "constant".
    value: the standard deviation, or the constant.
    """

    kind: str = "normal"
    value: float = 1.0


class Meaning(NamedTuple):
    """The axes of a weight, by letter.

    letters: the letters of all axes.
    inner: the letters of the axes that a contraction sums over.
    group: the letter of the axis that a `Route` selects from, such as that of experts.
    legend: letters that stand for other axes than in `core.dims.LEGEND`.
    """

    letters: str
    inner: str = ""
    group: str = ""
    legend: Legend = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes."""
        return named_axes(self.letters, self.legend)

    @property
    def is_matrix(self) -> bool:
        """Whether the weight maps features to features, as matrix optimizers and weight decay expect. Embeddings of tokens or positions
        do not."""
        return bool(self.inner) and not LOOKED_UP & set(self.axes)


def weight(shape: tuple[int, ...], meaning: Meaning, draw: Draw, kind: type[nnx.Variable] = nnx.Param) -> nnx.Variable:
    """Describes a weight that is not initialized yet. It is float32, as the master copy. Computations use the activations' dtype."""
    return kind(jax.ShapeDtypeStruct(shape, jnp.float32), draw=draw, meaning=meaning)


class Moved(nnx.Variable):
    """A weight that training changes by a rule instead of a gradient, such as a router's bias. It is always float32: it is added to
    scores to choose experts, and rounded to bfloat16 it would change the choice."""

    exact = True


def storage_dtype(v: nnx.Variable, dtype: Any) -> Any:
    """Returns the dtype in which a weight is stored if the model is stored in `dtype`."""
    if isinstance(v, Codes):
        return v.dtype
    return jnp.float32 if getattr(type(v), "exact", False) else dtype


def float32_addresses(model: nnx.Module) -> set[str]:
    """Returns the addresses of the weights that stay float32 whatever the model's dtype."""
    return {address for address, v in variables(model).items() if getattr(type(v), "exact", False)}


class Frozen(nnx.Variable):
    """A weight that is stored but not trained: quantized, or frozen by surgery."""


class Codes(Frozen):
    """An array of a quantized weight: the values, scales or zero points. It is never trained, even after `thaw`."""


class SelectionWeight(nnx.Variable):
    """A weight whose output only selects something, such as the weights of a sparse attention's indexer. No gradient reaches it, so it
    is not trained, decayed or adapted."""


def split(model: nnx.Module, *kinds: Any) -> tuple[Any, ...]:
    """Splits a model into its graph and its weights `{address: array}`: one dict for each requested kind, then one for the rest.

    `split(model)` returns (graph, all weights). `split(model, nnx.Param)` returns (graph, trained weights, other weights).
    """
    if not kinds:
        graph, state = nnx.split(model)
        return graph, _flat(state)
    graph, *states = nnx.split(model, *kinds, ...)
    return graph, *map(_flat, states)


def merge(graph: Any, *leaves: Leaves) -> Any:
    """Rebuilds the model from its graph and weights, the inverse of `split`. Outside of jit, this takes about 20 us per weight."""
    flat: Any = {tuple(address.split(".")): value for part in leaves for address, value in part.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def put(model: nnx.Module, leaves: Leaves) -> None:
    """Sets weights of a model, in place.

    Raises:
        KeyError: the model has no weight at an address.
        ValueError: an array has another shape than the model's weight.
    """
    for address, value in leaves.items():
        v = variable(model, address)
        if v.shape != value.shape:
            raise ValueError(f"{address}: shape {value.shape}, not {v.shape}")
        v.set_value(value)


def variable(model: nnx.Module, address: str) -> nnx.Variable:
    """Returns the variable at an address.

    Raises:
        KeyError: the model has no variable there.
    """
    node: Any = model
    for name in address.split("."):
        if not hasattr(node, name):
            raise KeyError(address)
        node = getattr(node, name)
    return node


def variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns `{address: variable}`, with each shared weight once. Use `put` to write."""
    return {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}


def meanings(model: nnx.Module) -> dict[str, Meaning]:
    return {address: v.get_metadata()["meaning"] for address, v in variables(model).items()}


def logical(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Returns the names of each weight's logical axes, by address, including the leading axis of stacked layers."""
    out = {}
    for address, v in variables(model).items():
        names = v.get_metadata()["meaning"].axes
        out[address] = ("layers",) * (len(v.shape) - len(names)) + names
    return out


def abstract(model: nnx.Module) -> Leaves:
    return {address: jax.ShapeDtypeStruct(v.shape, v.dtype) for address, v in variables(model).items()}


def undrawn(model: nnx.Module) -> list[str]:
    """Returns the addresses of the weights that are still descriptions."""
    return [a for a, v in variables(model).items() if isinstance(v.get_value(), jax.ShapeDtypeStruct)]


def fill(
    model: nnx.Module,
    key: Key[Array, ""],
    *,
    addresses: Callable[[str], list[str]],
    place: Callable[..., Any] | None = None,
) -> list[str]:
    """Initializes every weight that is still a description, in place. Returns the addresses of these weights.

    Each weight of each layer is drawn from `key` folded with its own per-layer name. A model therefore has the same numbers in any
    layout and on any mesh, whatever else was initialized or loaded. A small model is initialized by one loop over rows of equal length,
    because each random shape takes half a second to compile. A large model takes one program per gigabyte.

    Args:
        addresses: a function from a stored address to its per-layer names (`parts.stack.addresses.layer_addresses`). It returns one
            name if the weight is not stacked.
        place: a function from an address to its sharding, to initialize weights directly on a mesh.
    """
    todo = undrawn(model)
    kinds: dict[_Kind, list[_Todo]] = {}
    for address in todo:
        v, names = variable(model, address), addresses(address)
        metadata = v.get_metadata()
        stacked = len(v.shape) > len(metadata["meaning"].letters)
        assert len(names) == (v.shape[0] if stacked else 1), f"{address} {v.shape} has {len(names)} names"
        kind = _Kind(tuple(v.shape[1:] if stacked else v.shape), jnp.dtype(v.dtype), metadata["draw"].kind)
        hashes = [zlib.crc32(name.encode()) for name in names]
        kinds.setdefault(kind, []).append(_Todo(address, v, stacked, hashes, metadata["draw"].value))
    if _prefixed(key) and _padded(kinds) <= SMALL and jax.process_count() == 1:
        _draw_rows(key, kinds, place)
        return todo
    for chunk in _chunks(kinds):
        layout = tuple((kind, tuple((len(entry.hashes), entry.stacked) for entry in some)) for kind, some in chunk)
        drawer = _drawer(layout, place and tuple(place(entry.address) for _, some in chunk for entry in some))
        hashes = [np.asarray([h for entry in some for h in entry.hashes], np.uint32) for _, some in chunk]
        values = [np.asarray([entry.value for entry in some for _ in entry.hashes], kind.dtype) for kind, some in chunk]
        for entry, array in zip([entry for _, some in chunk for entry in some], drawer(key, hashes, values), strict=True):
            entry.variable.set_value(array)
    return todo


class _Kind(NamedTuple):
    """What weights have in common that are initialized in the same way.

    shape: the shape for one layer.
    draw: as `Draw.kind`.
    """

    shape: tuple[int, ...]
    dtype: Any
    draw: str


class _Todo(NamedTuple):
    """A weight to initialize.

    stacked: whether the weight has a leading axis of layers.
    hashes: a hash of each per-layer name.
    value: as `Draw.value`.
    """

    address: str
    variable: nnx.Variable
    stacked: bool
    hashes: list[int]
    value: float


_Chunk = list[tuple[_Kind, list[_Todo]]]


def _prefixed(key: Key[Array, ""]) -> bool:
    """Whether the first n of m > n normal numbers drawn from a key equal n numbers drawn from the same key."""
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return bool(partitionable) and str(jax.random.key_impl(key)) == "threefry2x32"


def _padded(kinds: dict[_Kind, list[_Todo]]) -> int:
    """Returns how many normal numbers `_draw_rows` draws, where every weight of a layer takes as many as the largest."""
    normal = {kind: some for kind, some in kinds.items() if kind.draw == "normal"}
    longest = max((math.prod(kind.shape) for kind in normal), default=0)
    return _next_power_of_two(longest) * _next_power_of_two(sum(len(entry.hashes) for some in normal.values() for entry in some))


def _draw_rows(key: Key[Array, ""], kinds: dict[_Kind, list[_Todo]], place: Callable[..., Any] | None) -> None:
    """Initializes a small model. First draws all normal numbers of a dtype, one row per weight of a layer. Then cuts the weights out of
    these rows."""

    def put(todo: _Todo, array: Any) -> None:
        todo.variable.set_value(jax.device_put(array, place(todo.address) if place else None))

    normal: dict[Any, list[tuple[_Kind, _Todo]]] = {}
    for kind, some in kinds.items():
        for entry in some:
            if kind.draw == "normal":
                normal.setdefault(kind.dtype, []).append((kind, entry))
            else:
                put(entry, np.full((len(entry.hashes),) * entry.stacked + kind.shape, entry.value, kind.dtype))
    for dtype, some in normal.items():
        names = np.asarray([h for _, entry in some for h in entry.hashes], np.uint32)
        values = np.asarray([entry.value for _, entry in some for _ in entry.hashes], dtype)
        # Lengths are rounded up to powers of two, so that most models share a program. The numbers that a row begins with do not
        # depend on its length.
        size = _next_power_of_two(max(math.prod(kind.shape) for kind, _ in some))
        more = (0, _next_power_of_two(len(names)) - len(names))
        rows, at = np.asarray(_rows(key, np.pad(names, more), np.pad(values, more), size, dtype)), 0
        for kind, entry in some:
            count, shape = len(entry.hashes), (len(entry.hashes),) * entry.stacked + kind.shape
            put(entry, np.ascontiguousarray(rows[at : at + count, : math.prod(kind.shape)]).reshape(shape))
            at += count


def _next_power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@partial(jax.jit, static_argnums=(3, 4))
def _rows(key: Key[Array, ""], names: Array, values: Array, size: int, dtype: Any) -> Array:
    def row(of: tuple[Array, Array]) -> Array:
        name, value = of
        return value * jax.random.normal(jax.random.fold_in(key, name), (size,), dtype)

    return jax.lax.map(row, (names, values))


def _chunks(kinds: dict[_Kind, list[_Todo]]) -> Iterator[_Chunk]:
    """Groups the weights by the program that initializes them. If all weights together have more than `AT_ONCE` bytes, a chunk has
    weights of one kind only, and all chunks of a kind except the last use the same program."""

    def size(kind: _Kind, todo: _Todo) -> int:
        return len(todo.hashes) * math.prod(kind.shape) * kind.dtype.itemsize

    if sum(size(kind, entry) for kind, some in kinds.items() for entry in some) <= AT_ONCE:
        yield list(kinds.items())
        return
    for kind, some in kinds.items():
        each = max(1, AT_ONCE // max(size(kind, entry) for entry in some))
        for at in range(0, len(some), each):
            yield [(kind, some[at : at + each])]


@lru_cache(maxsize=64)
def _drawer(layout: tuple[Any, ...], places: tuple[Any, ...] | None) -> Callable[..., list[Array]]:
    """Compiles a function (key, hashes of each kind, values of each kind) that returns the weights in the order of `layout`."""

    def draw(key: Key[Array, ""], hashes: list[Array], values: list[Array]) -> list[Array]:
        out = []
        for (kind, weights), names, scales in zip(layout, hashes, values, strict=True):

            def tensor(name: Array, value: Array, kind: _Kind = kind) -> Array:
                if kind.draw == "normal":
                    return value * jax.random.normal(jax.random.fold_in(key, name), kind.shape, kind.dtype)
                return jnp.full(kind.shape, value, kind.dtype)

            tensors, at = jax.vmap(tensor)(names, scales), 0
            for count, stacked in weights:
                out.append(tensors[at : at + count] if stacked else tensors[at])
                at += count
        return out

    return jax.jit(draw, out_shardings=None if places is None else list(places))


def _flat(state: Any) -> Leaves:
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}


def parameter_count(leaves: Leaves) -> int:
    return sum(math.prod(a.shape) for a in leaves.values())
