"""The devices as a named grid.

data    every device has all weights and its own rows of the batch
fsdp    weights and optimizer are split too, and gathered layer by layer as they are used (arXiv:1910.02054)
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings


class MeshSettings(Settings):
    """How many devices along each axis; one of them may be -1, whatever is left."""

    data: int = Field(1, ge=-1)
    """Copies of the weights."""
    fsdp: int = Field(-1, ge=-1)
    """Pieces that each copy is split into."""

    def build(self, devices: Any = None) -> Mesh:
        """The mesh over these devices, or all there are.

        Raises:
            BadInput: the sizes do not multiply to the number of devices.
        """
        devices = jax.devices() if devices is None else devices
        sizes = {"data": self.data, "fsdp": self.fsdp}
        open_axes = [name for name, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(open_axes) > 1 or 0 in sizes.values():
            raise BadInput(f"mesh {_told(sizes)}: at most one axis may be -1, and none 0")
        if open_axes and len(devices) % fixed == 0:
            sizes[open_axes[0]] = len(devices) // fixed
        if math.prod(sizes.values()) != len(devices):
            raise BadInput(
                f"mesh {_told(sizes)} does not make {len(devices)} devices", hint="set one of its axes to -1"
            )
        grid = np.asarray(devices).reshape(tuple(sizes.values()))
        return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _told(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
