"""Zero-copy views of the layers of stacked weights in CPU memory, so that a scanned model can decode unrolled."""

from typing import Any

import jax
import numpy as np

from argosy.models.parts.stack import unrolled_model
from argosy.models.parts.stack.addresses import stored_addresses
from argosy.models.parts.weight import Leaves, split
from argosy.ops.native.products import Panels


def is_on_one_cpu(weights: Leaves) -> bool:
    """Whether every weight is on one CPU device. Packed weights always are."""
    return all(
        isinstance(a, Panels)
        or (
            isinstance(a, jax.Array)
            and a.is_fully_addressable
            and len(a.devices()) == 1
            and next(iter(a.devices())).platform == "cpu"
        )
        for a in weights.values()
    )


class LayerViews:
    """The unrolled form of a scanned model, over views of its stacked weights.

    model: the unrolled model.
    """

    def __init__(self, model: Any):
        self.model = unrolled_model(model)
        self.graph, _ = split(self.model)
        self.stored = stored_addresses(model)

    def of(self, weights: Leaves) -> Leaves:
        """Returns the weights of the unrolled model, by parameter name. A layer that does not begin at a multiple of 64 bytes is
        copied, because XLA requires this alignment.

        While views of an array are alive, a training step that donates the array copies it instead. So views are made at each call,
        which takes 35 ms for 270 weights. They are made from a separate handle of the array, because JAX caches NumPy's view in the
        handle.
        """
        stacked = {address for address, layer in self.stored.values() if layer is not None}
        hosts = {address: np.asarray(weights[address].addressable_data(0)) for address in stacked}
        out = {}
        for name, (address, layer) in self.stored.items():
            whole = weights[address]
            device = next(iter(whole.devices()))
            out[name] = whole if layer is None else jax.device_put(hosts[address][layer], device, may_alias=True)
        return out
