"""Places arrays on devices as the rules say: weights, their optimizer state, batches."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from argosy.parallel.rules import DEFAULT, Rules


def like_weights(tree: Any, weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> Any:
    """A sharding for every leaf of `tree`: that of the weight with the same address and shape, otherwise replicated.

    Optimizer states mirror the weights under names of their own (mu, nu); only the address is compared.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> NamedSharding:
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        address = next((k for k in reversed(keys) if k in weights), None)
        if address is None or tuple(leaf.shape) != tuple(shapes[address].shape):
            return everywhere
        return weights[address]

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh, rules: Rules = DEFAULT) -> NamedSharding:
    """The sharding of a batch's rows over the mesh axes that split rows. The caller makes sure that their number is divisible."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh, rules)))


def row_axes(mesh: Mesh, rules: Rules = DEFAULT) -> tuple[str, ...]:
    """The mesh axes that split the rows of a batch."""
    return tuple(axis for axis in rules.activations["batch"] if axis in mesh.shape)


def row_shares(mesh: Mesh, rules: Rules = DEFAULT) -> int:
    """How many shares the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh, rules))


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows into global arrays."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
