"""Weights begin as descriptions: shape, letters, how to draw them. Building a model therefore draws nothing and takes
milliseconds at any size; loading never draws what it overwrites, planning needs no memory, and whatever a checkpoint
left out can be drawn alone afterwards.

Every weight has an address, its dotted path: "layers.3.attn.q.w". Outside the model, weights are a flat
`{address: array}`: what optimizers, checkpoints, name tables and sharding rules work on. How layers are stacked in memory
(`parts.stack`) changes the address and the leading axes, never the letters.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from argosy.core.dims import LEGEND, LOOKED_UP

Leaves = dict[str, Any]  # {address: array or jax.ShapeDtypeStruct}


class Draw(NamedTuple):
    """How a weight starts: normal with this standard deviation, or constant."""

    kind: str = "normal"
    value: float = 1.0


class Meaning(NamedTuple):
    """What the axes of a weight are, by letter (`core.dims`): all of them, those summed over, those chosen per row."""

    letters: str
    inner: str = ""
    group: str = ""

    @property
    def is_matrix(self) -> bool:
        """It maps features to features: what matrix optimizers and weight decay are for. A lookup of words or positions is not."""
        return bool(self.inner) and not LOOKED_UP & set(self.letters)


def weight(shape: tuple[int, ...], meaning: Meaning, draw: Draw, kind: type[nnx.Variable] = nnx.Param) -> nnx.Variable:
    """A weight not yet drawn. Float32: the master copy; what it is computed in follows the activations."""
    return kind(jax.ShapeDtypeStruct(shape, jnp.float32), draw=draw, meaning=meaning)


class Moved(nnx.Variable):
    """A weight that training moves by a rule of its own, not by a gradient. It is added to numbers to make a choice, so it stays
    float32 whatever the model is kept in: rounded to bfloat16 it makes another choice."""

    exact = True


def kept_in(v: nnx.Variable, dtype: Any) -> Any:
    """The type that a weight is kept in, of a model that is kept in `dtype`."""
    if isinstance(v, Codes):
        return v.dtype
    return jnp.float32 if getattr(type(v), "exact", False) else dtype


def exact(model: nnx.Module) -> set[str]:
    """Addresses of the weights that stay float32."""
    return {address for address, v in variables(model).items() if getattr(type(v), "exact", False)}


class Frozen(nnx.Variable):
    """A weight that is kept but not trained: quantised, or frozen by surgery."""


class Codes(Frozen):
    """Part of a quantized weight: its values, scales or zero points. Never trained, whatever is thawed."""


class Choosing(nnx.Variable):
    """A weight that only a choice follows from. No gradient reaches it: nothing here trains, decays or adapts it."""


def split(model: nnx.Module, *kinds: Any) -> tuple[Any, ...]:
    """The model's graph, and its weights as `{address: array}`: one dict for each kind asked, and one for the rest.

    `split(model)` gives (graph, all); `split(model, nnx.Param)` gives (graph, trained, rest).
    """
    if not kinds:
        graph, state = nnx.split(model)
        return graph, _flat(state)
    graph, *states = nnx.split(model, *kinds, ...)
    return graph, *map(_flat, states)


def merge(graph: Any, *leaves: Leaves) -> Any:
    """The model again, with these weights. Cheap under jit; outside it, costs about 20 us a weight."""
    flat: Any = {tuple(address.split(".")): value for part in leaves for address, value in part.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def put(model: nnx.Module, leaves: Leaves) -> None:
    """Sets these weights in place.

    Raises:
        KeyError: an address that the model does not have.
        ValueError: a shape that is not the model's.
    """
    for address, value in leaves.items():
        v = variable(model, address)
        if v.shape != value.shape:
            raise ValueError(f"{address}: shape {value.shape}, not {v.shape}")
        v.set_value(value)


def variable(model: nnx.Module, address: str) -> nnx.Variable:
    """The variable at an address.

    Raises:
        KeyError: there is none.
    """
    node: Any = model
    for name in address.split("."):
        if not hasattr(node, name):
            raise KeyError(address)
        node = getattr(node, name)
    return node


def variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """`{address: variable}`, each shared weight once. For reading: `put` writes."""
    return {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}


def meanings(model: nnx.Module) -> dict[str, Meaning]:
    return {address: v.get_metadata()["meaning"] for address, v in variables(model).items()}


def logical(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Names of the logical axes of each weight, the leading axis of stacked layers included."""
    out = {}
    for address, v in variables(model).items():
        names = tuple(LEGEND.get(letter, letter) for letter in v.get_metadata()["meaning"].letters)
        out[address] = ("layers",) * (len(v.shape) - len(names)) + names
    return out


def abstract(model: nnx.Module) -> Leaves:
    return {address: jax.ShapeDtypeStruct(v.shape, v.dtype) for address, v in variables(model).items()}


def undrawn(model: nnx.Module) -> list[str]:
    """Addresses of the weights that are still descriptions."""
    return [a for a, v in variables(model).items() if isinstance(v.get_value(), jax.ShapeDtypeStruct)]


def fill(
    model: nnx.Module,
    key: Key[Array, ""],
    *,
    addresses: Callable[[str], list[str]],
    place: Callable[..., Any] | None = None,
) -> list[str]:
    """Draws every weight that is still a description; returns their addresses.

    Each tensor of each layer draws from `key` folded with its own name, so a model is the same numbers whatever its
    layout, its mesh, and whatever else was drawn or loaded.

    Args:
        addresses: the per-layer names of a stored address (`parts.stack.layer_addresses`); one, where it is not stacked.
        place: the sharding of an address, for weights drawn straight onto a mesh.
    """
    todo = undrawn(model)
    for address in todo:
        v = variable(model, address)
        names = addresses(address)
        hashes = np.asarray([zlib.crc32(name.encode()) for name in names], np.uint32)
        metadata = v.get_metadata()
        stacked = len(v.shape) > len(metadata["meaning"].letters)
        draw: Draw = metadata["draw"]
        drawn = jax.jit(
            _drawn, static_argnames=("shape", "kind", "stacked", "dtype"), out_shardings=place and place(address)
        )
        shape = tuple(v.shape[1:] if stacked else v.shape)
        assert len(names) == (v.shape[0] if stacked else 1), f"{address} {v.shape} has {len(names)} names"
        v.set_value(
            drawn(key, hashes, draw.value, shape=shape, kind=draw.kind, stacked=stacked, dtype=jnp.dtype(v.dtype))
        )
    return todo


def _flat(state: Any) -> Leaves:
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}


def _drawn(
    key: Key[Array, ""], hashes: Any, value: Any, *, shape: tuple[int, ...], kind: str, stacked: bool, dtype: Any
) -> Float[Array, "..."]:
    def one(name: Any) -> Array:
        if kind == "normal":
            return jnp.asarray(value, dtype) * jax.random.normal(jax.random.fold_in(key, name), shape, dtype)
        return jnp.full(shape, value, dtype)

    return jax.vmap(one)(hashes) if stacked else one(hashes[0])


def count(leaves: Leaves) -> int:
    return sum(math.prod(a.shape) for a in leaves.values())
