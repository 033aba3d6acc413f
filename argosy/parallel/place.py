"""Places arrays on devices as the rules say: weights, their optimizer state, batches."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from argosy.core.errors import Unsupported
from argosy.parallel.row_shares import RowPositions, row_positions
from argosy.parallel.rules import DEFAULT, Rules


def like_weights(tree: Any, weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> Any:
    """A sharding for every leaf of `tree` that has a weight's address: along each axis that is as long as the weight's, that of the
    weight. Everything else is replicated.

    Optimizer states mirror the weights under names of their own (mu, nu); only the address is compared. Factors of a weight have 1 for
    the axes that they lack, and may have more axes after the weight's.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(path: Any, leaf: Any) -> NamedSharding:
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        address = next((k for k in reversed(keys) if k in weights), None)
        if address is None:
            return everywhere
        shape, spec = tuple(shapes[address].shape), tuple(weights[address].spec)
        if tuple(leaf.shape) == shape:
            return weights[address]
        if len(leaf.shape) < len(shape):
            return everywhere
        same = [n == m for n, m in zip(leaf.shape, shape)]
        return NamedSharding(mesh, PartitionSpec(*(axes if same[i] else None for i, axes in enumerate(spec))))

    return jax.tree_util.tree_map_with_path(placed, tree)


def batch_sharding(mesh: Mesh, rules: Rules = DEFAULT) -> NamedSharding:
    """The sharding of a batch's rows over the mesh axes that split rows. The caller makes sure that their number is divisible."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh, rules)))


def row_axes(mesh: Mesh, rules: Rules = DEFAULT) -> tuple[str, ...]:
    """The mesh axes that split the rows of a batch. Stages of a pipeline all begin with the same rows."""
    return tuple(axis for axis in rules.activations["batch"] if axis in mesh.shape and axis != "stage")


def row_shares(mesh: Mesh, rules: Rules = DEFAULT) -> int:
    """The number of shares that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh, rules))


def process_rows(mesh: Mesh, rules: Rules = DEFAULT) -> RowPositions:
    """The rows that each process reads, as positions along the axes that split rows."""
    return row_positions(mesh.devices, mesh.axis_names, row_axes(mesh, rules))


def rows_here(mesh: Mesh, rows: int, rules: Rules = DEFAULT) -> tuple[int, int]:
    """The share of a batch's rows that this process reads from its data: (index, number of equal shares). It is (0, 1) with one
    process, or if process boundaries only cross other axes, such as `tensor`.

    Raises:
        Unsupported: processes read some of the same rows, and others not; or the rows are not as many for each.
    """
    positions = process_rows(mesh, rules)
    shares = positions.shares
    if not positions.divide or rows % positions.total:
        problem = "the processes do not each read one share of the rows of a batch"
        raise Unsupported(problem, hint="of mesh.data, mesh.fsdp and mesh.expert, let the first above 1 be a multiple of the processes")
    return shares.index(positions.of[jax.process_index()]), len(shares)


def on_devices(array: Any, place: Any, copy: bool = False) -> Any:
    """An array of the host, which all processes have, on the devices of a sharding. `jax.device_put` would send it to every process to
    compare.

    Args:
        copy: whether what a device gets is copied. Otherwise a CPU may read the memory of the host's array as long as the result lives.
    """
    if place is None or place.is_fully_addressable:
        return jax.device_put(np.array(array) if copy else array, place)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index]) if copy else host[index])


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows into global arrays. Its devices take them in the order of their positions, so that the global batch has
    the rows of all processes in an order that follows from the mesh (`parallel.row_shares`)."""
    sharding = batch_sharding(mesh)
    if sharding.is_fully_addressable:
        return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
    positions = process_rows(mesh)
    local_positions = positions.of[jax.process_index()]

    def placed(rows: np.ndarray) -> jax.Array:
        each = len(rows) // len(local_positions)
        shape = (each * positions.total, *rows.shape[1:])

        def part(index: Any) -> np.ndarray:
            at = local_positions.index((index[0].start or 0) // each)
            return rows[at * each : (at + 1) * each]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: placed(rows) for name, rows in batch.items()}
