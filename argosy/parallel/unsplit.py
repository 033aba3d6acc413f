"""Finds the weights that a mesh with sharded weights leaves whole, because their axes are not divisible by its sizes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from argosy.core.counts import plural
from argosy.observe.readable import format_bytes

# Whole weights are reported only if they are more than this share of all weights, by bytes.
TOLERANCE = 0.02
# Mesh axes that split weights.
SPLITTING = ("fsdp", "tensor", "expert", "stage")
# The number of weights that a message names.
NAMED = 3


def unsplit_weights(mesh: Mesh, weights: Mapping[str, Any]) -> str:
    """Returns a sentence about the weights that every device has whole although the mesh splits weights; "" if they are few.

    Args:
        weights: the arrays, or their shapes with shardings, by parameter name.
    """
    if all(mesh.shape.get(axis, 1) == 1 for axis in SPLITTING):
        return ""
    # A quantized weight is several arrays.
    arrays = [(address, array) for address, weight in weights.items() for array in jax.tree.leaves(weight)]
    arrays = [(address, array) for address, array in arrays if isinstance(array.sharding, NamedSharding)]
    replicated = {address: array for address, array in arrays if all(axis is None for axis in array.sharding.spec)}
    size_bytes = sum(map(_bytes, replicated.values()))
    share = size_bytes / max(sum(_bytes(array) for _, array in arrays), 1)
    if share <= TOLERANCE:
        return ""
    largest = sorted(replicated, key=lambda address: _bytes(replicated[address]), reverse=True)[:NAMED]
    listing = ", ".join(f"{address} {list(replicated[address].shape)}" for address in largest)
    more = f" and {plural(len(replicated) - NAMED, 'other')}" if len(replicated) > NAMED else ""
    return f"{format_bytes(size_bytes)} of weights ({share:.0%}) on every device, as no rule splits them: {listing}{more}"


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
