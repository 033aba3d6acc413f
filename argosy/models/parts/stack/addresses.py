"""Per-layer names of a model's weights, whether the layers are stored one by one or stacked for a scan."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from argosy.models.parts.stack import Stack
from argosy.models.parts.weight import Leaves, variables


def layer_addresses(model: nnx.Module) -> Callable[[str], list[str]]:
    """Returns a function from a stored address to its per-layer names, in the order of the leading axis."""
    stacks = {".".join([*map(str, path), ""]): s for path, s in nnx.iter_modules(model) if isinstance(s, Stack)}

    def names(address: str) -> list[str]:
        for prefix, stack in stacks.items():
            for block, (_, indexes) in stack.stored().items() if stack.run.stacked else ():
                if address.startswith(f"{prefix}{block}."):
                    rest = address.removeprefix(f"{prefix}{block}.")
                    return [f"{prefix}{i}.{rest}" for i in indexes]
        return [address]

    return names


def stored_addresses(model: nnx.Module) -> dict[str, tuple[str, int | None]]:
    """Returns {per-layer name: (stored address, index on the leading axis)}. The index is None if the weight is not stacked."""
    names = layer_addresses(model)
    out: dict[str, tuple[str, int | None]] = {}
    for address, v in variables(model).items():
        many = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        for i, name in enumerate(names(address)):
            out[name] = (address, i if many else None)
    return out


def to_layers(model: nnx.Module, leaves: Leaves) -> Leaves:
    """Converts stored weights to weights by per-layer name. Stacked weights are sliced."""
    return {
        name: leaves[a] if i is None else leaves[a][i]
        for name, (a, i) in stored_addresses(model).items()
        if a in leaves
    }


def from_layers(model: nnx.Module, by_layer: Mapping[str, Any]) -> Leaves:
    """The inverse of `to_layers`: converts weights by per-layer name to the form in which this model stores them.

    Stacked weights become NumPy arrays on the host, one at a time.
    """
    out: Leaves = {}
    names = layer_addresses(model)
    for address, v in variables(model).items():
        many = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        parts = [by_layer[name] for name in names(address)]
        out[address] = np.stack([np.asarray(p) for p in parts]) if many else parts[0]
    return out
