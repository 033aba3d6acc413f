"""Places arrays on devices as the rules say: weights, their optimizer state, batches."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from argosy.core.errors import Unsupported
from argosy.parallel.rules import DEFAULT, Rules


def like_weights(tree: Any, weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> Any:
    """A sharding for every leaf of `tree`: that of the weight with the same address and shape, otherwise replicated.

    Optimizer states mirror the weights under names of their own (mu, nu); only the address is compared.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(path: Any, leaf: Any) -> NamedSharding:
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        address = next((k for k in reversed(keys) if k in weights), None)
        if address is None or tuple(leaf.shape) != tuple(shapes[address].shape):
            return everywhere
        return weights[address]

    return jax.tree_util.tree_map_with_path(placed, tree)


def batch_sharding(mesh: Mesh, rules: Rules = DEFAULT) -> NamedSharding:
    """The sharding of a batch's rows over the mesh axes that split rows. The caller makes sure that their number is divisible."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh, rules)))


def row_axes(mesh: Mesh, rules: Rules = DEFAULT) -> tuple[str, ...]:
    """The mesh axes that split the rows of a batch. Stages of a pipeline all begin with the same rows."""
    return tuple(axis for axis in rules.activations["batch"] if axis in mesh.shape and axis != "stage")


def row_shares(mesh: Mesh, rules: Rules = DEFAULT) -> int:
    """How many shares the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh, rules))


def rows_here(mesh: Mesh, rows: int, rules: Rules = DEFAULT) -> tuple[int, int]:
    """Which share of a batch's rows this process's devices read: (number, of how many equal shares). Without several processes it is
    (0, 1); so it is where a process boundary runs through the other axes alone, such as `tensor`.

    Raises:
        Unsupported: its devices read rows that are not one such share.
    """
    everyone = batch_sharding(mesh, rules).addressable_devices_indices_map((rows,))
    spans = sorted({(one[0].start or 0, rows if one[0].stop is None else one[0].stop) for one in everyone.values() if one})
    begin, end = spans[0][0], spans[-1][1]
    joined = all(a[1] == b[0] for a, b in pairwise(spans))
    if not joined or rows % (end - begin) or begin % (end - begin):
        what = "the devices of a process read rows of the batch that do not follow each other"
        raise Unsupported(what, hint="of mesh.data, mesh.fsdp and mesh.expert, let the first above 1 be a multiple of the processes")
    return begin // (end - begin), rows // (end - begin)


def on_devices(array: Any, place: Any) -> Any:
    """An array of the host, which all processes have, on the devices of a sharding. `jax.device_put` would send it to every process to
    compare."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(array, place)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows into global arrays."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
