"""Places weights, optimizer state and batches on devices by the sharding rules."""

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
    """Returns a sharding for every leaf of a tree, such as an optimizer state. A leaf under the name of a weight is split like the
    weight along each axis that has the weight's size. Everything else is replicated.

    Optimizer states hold the names of weights under names of their own (mu, nu). Only the name of the weight is compared. Factors of a
    weight have size 1 for the axes that they lack, and may have further axes after those of the weight.

    Args:
        tree: the tree of arrays or shapes.
        weights: the sharding of each weight, by parameter name.
        shapes: the shape of each weight, by parameter name.
        mesh: the mesh.
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
    """Returns the sharding of a batch whose rows are split over the mesh axes that split rows. The number of rows must be divisible by
    `row_shares`."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh, rules)))


def row_axes(mesh: Mesh, rules: Rules = DEFAULT) -> tuple[str, ...]:
    """Returns the mesh axes that split the rows of a batch. `stage` is not among them, because all stages begin with the same rows."""
    return tuple(axis for axis in rules.activations["batch"] if axis in mesh.shape and axis != "stage")


def row_shares(mesh: Mesh, rules: Rules = DEFAULT) -> int:
    """Returns the number of shares that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh, rules))


def process_rows(mesh: Mesh, rules: Rules = DEFAULT) -> RowPositions:
    """Returns the rows that each process reads, as positions along the axes that split rows."""
    return row_positions(mesh.devices, mesh.axis_names, row_axes(mesh, rules))


def rows_here(mesh: Mesh, rows: int, rules: Rules = DEFAULT) -> tuple[int, int]:
    """Returns the share of a batch's rows that this process reads from its data, as (index, number of equal shares). It is (0, 1) with
    one process, or if process boundaries only cross other axes, such as `tensor`.

    Args:
        rows: the number of rows of the batch.

    Raises:
        Unsupported: two processes share some of their rows and not others, or the shares are not equally large.
    """
    positions = process_rows(mesh, rules)
    shares = positions.shares
    if not positions.divide or rows % positions.total:
        problem = "the processes do not each read one share of the rows of a batch"
        raise Unsupported(problem, hint="of mesh.data, mesh.fsdp and mesh.expert, let the first above 1 be a multiple of the processes")
    return shares.index(positions.of[jax.process_index()]), len(shares)


def on_devices(array: Any, place: Any, copy: bool = False) -> Any:
    """Puts an array of the host, which all processes have, on the devices of a sharding. Unlike `jax.device_put`, this does not send
    the array to every process for a comparison.

    Args:
        place: the sharding or device. None stands for the default device.
        copy: whether the data are copied. Otherwise a CPU device may use the memory of the host's array as long as the result exists.
    """
    if place is None or place.is_fully_addressable:
        return jax.device_put(np.array(array) if copy else array, place)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index]) if copy else host[index])


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Makes the global arrays of a batch from the rows of each process. The devices of a process take its rows in the order of their
    positions, so the mesh determines the order of rows in the global batch (`parallel.row_shares`)."""
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
