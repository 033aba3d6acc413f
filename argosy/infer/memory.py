"""How much memory a cache may take, and how it lies on several devices."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from argosy.models.parts.cache import Caches, Specs, bytes_of, laid_out, layouts, paged
from argosy.models.parts.weight import Leaves
from argosy.observe.environment import memory_bytes
from argosy.parallel.scope import scope

# The most bytes of a cache in the memory of a CPU, and the share of what is free there, unless one sequence needs more. On other
# devices the cache takes this share of what the weights leave: activations, logits and XLA's programs need the rest.
CACHE, OF_FREE, OF_DEVICE = 4e9, 0.25, 0.8


def mesh_of(weights: Leaves) -> Mesh | None:
    """The mesh of devices that weights are split over; None if they are on one device."""
    for a in weights.values():
        if isinstance(a, jax.Array) and isinstance(a.sharding, NamedSharding) and len(a.devices()) > 1:
            mesh = a.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


def room_for_cache(weights: Leaves) -> float:
    """Bytes that a cache may take beside these weights on each device."""
    devices = {device for a in weights.values() if isinstance(a, jax.Array) for device in a.devices()}
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    if stats and all("bytes_limit" in found for found in stats):
        return OF_DEVICE * min(found["bytes_limit"] - found["bytes_in_use"] for found in stats)
    free = memory_bytes()[1]
    return (CACHE if free is None else min(CACHE, OF_FREE * free)) / max(len(devices), 1)


def pages_for_cache(specs: Specs, weights: Leaves, page: int, dtype: Any, besides: int = 0, **how: Any) -> int:
    """The number of pages that there is room for.

    Args:
        besides: bytes of other caches for each page, on each device.
        how: longest and slack, as in `paged`.
    """
    taken = page_bytes(specs, mesh_of(weights), page, dtype, **how) + besides
    return int(room_for_cache(weights) // max(taken, 1))


def page_bytes(specs: Specs, mesh: Mesh | None, page: int, dtype: Any, **how: Any) -> int:
    """Bytes of a page on each device. Arguments are those of `pages_for_cache`."""
    one = jax.eval_shape(lambda: paged(specs, 0, 1, page, dtype, **how))
    if mesh is None:
        return bytes_of(one)
    with scope(mesh):
        places = layouts(specs, one)
    return sum(
        math.prod(NamedSharding(mesh, places[name][key]).shard_shape(a.shape)) * a.dtype.itemsize
        for name, cache in one.items()
        for key, a in cache.items()
    )


def allocated(specs: Specs, mesh: Mesh | None, slots: int, pages: int, page: int, dtype: Any, longest: int) -> Caches:
    """Empty caches of an engine: sequences may be rolled back to any length."""

    def empty() -> Caches:
        return paged(specs, slots, pages, page, dtype, longest=longest, slack=longest)

    if mesh is None:
        return empty()
    with scope(mesh):
        return jax.jit(lambda: laid_out(specs, empty()))()
