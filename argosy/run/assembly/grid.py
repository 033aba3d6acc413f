"""Describes the mesh of a run for its header, with the weights that the mesh does not split."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from argosy.parallel.unsplit import unsplit_weights


def mesh_header(mesh: Mesh, weights: Mapping[str, Any]) -> dict[str, str]:
    """Returns the header's lines about the mesh.

    Args:
        weights: the weights by parameter name, as arrays or as shapes with shardings.
    """
    if mesh.size == 1:
        return {}
    lines = {"mesh": " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)}
    if unsplit := unsplit_weights(mesh, weights):
        lines["whole"] = unsplit
    return lines
