"""The mesh of a run in its header, and the weights that the mesh does not split."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from argosy.core.counts import plural
from argosy.observe.readable import sized

# Of all weights, by bytes: less is not said.
TOLERANCE = 0.02
# Mesh axes that split weights.
SPLITTING = ("fsdp", "tensor", "expert", "stage")
# Weights that are named.
NAMED = 3


def mesh_header(mesh: Mesh, weights: Mapping[str, Any]) -> dict[str, str]:
    """The header's lines about the mesh.

    Args:
        weights: arrays, or their shapes with shardings, by address.
    """
    if mesh.size == 1:
        return {}
    lines = {"mesh": " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)}
    if left := _whole(mesh, weights):
        lines["whole"] = left
    return lines


def _whole(mesh: Mesh, weights: Mapping[str, Any]) -> str:
    """The weights that every device has whole, although the mesh splits weights; "" where they are few."""
    if all(mesh.shape.get(axis, 1) == 1 for axis in SPLITTING):
        return ""
    # A quantized weight is several arrays.
    arrays = [(address, array) for address, weight in weights.items() for array in jax.tree.leaves(weight)]
    kept = {address: array for address, array in arrays if all(axis is None for axis in array.sharding.spec)}
    taken = sum(map(_bytes, kept.values()))
    share = taken / max(sum(_bytes(array) for _, array in arrays), 1)
    if share <= TOLERANCE:
        return ""
    largest = sorted(kept, key=lambda address: _bytes(kept[address]), reverse=True)[:NAMED]
    named = ", ".join(f"{address} {list(kept[address].shape)}" for address in largest)
    more = f" and {plural(len(kept) - NAMED, 'other')}" if len(kept) > NAMED else ""
    return f"{sized(taken)} of weights ({share:.0%}) on every device, as no rule splits them: {named}{more}"


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
