"""How much memory a cache may take."""

import jax

from argosy.models.parts.weight import Leaves
from argosy.observe.environment import memory_bytes

# The most bytes of a cache in the memory of a CPU, and the share of what is free there, unless one sequence needs more. On other
# devices the cache takes this share of what the weights leave: activations, logits and XLA's programs need the rest.
CACHE, OF_FREE, OF_DEVICE = 4e9, 0.25, 0.8


def room_for_cache(weights: Leaves) -> float:
    """Bytes that a cache may take beside these weights, where they are."""
    devices = {device for a in weights.values() if isinstance(a, jax.Array) for device in a.devices()}
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    if stats and all("bytes_limit" in found for found in stats):
        return OF_DEVICE * len(stats) * min(found["bytes_limit"] - found["bytes_in_use"] for found in stats)
    free = memory_bytes()[1]
    return CACHE if free is None else min(CACHE, OF_FREE * free)
