"""The mesh of a run in its header, and the weights that the mesh does not split."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from argosy.parallel.unsplit import unsplit_weights


def mesh_header(mesh: Mesh, weights: Mapping[str, Any]) -> dict[str, str]:
    """The header's lines about the mesh.

    Args:
        weights: arrays, or their shapes with shardings, by address.
    """
    if mesh.size == 1:
        return {}
    lines = {"mesh": " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)}
    if unsplit := unsplit_weights(mesh, weights):
        lines["whole"] = unsplit
    return lines
