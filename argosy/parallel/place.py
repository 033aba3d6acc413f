"""Putting arrays where the rules say: weights, what the optimizer keeps for each of them, batches."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH_AXES = ("data", "fsdp")


def like_weights(tree: Any, weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> Any:
    """A sharding for every leaf of `tree`: that of the weight under whose address and shape it stands, else replicated.

    Optimizer states mirror the weights under names of their own (mu, nu); this follows the address alone.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> NamedSharding:
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        address = next((k for k in reversed(keys) if k in weights), None)
        if address is None or tuple(leaf.shape) != tuple(shapes[address].shape):
            return everywhere
        return weights[address]

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def stream_sharding(mesh: Mesh) -> NamedSharding:
    """The residual stream [B T D]: rows over all devices, features whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None, None))


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows, as its part of the global arrays."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
