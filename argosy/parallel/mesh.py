"""The devices as a grid with named axes.

data      each part has all weights and its own rows of the batch
fsdp      each part has its own rows, and its share of weights, gradients and optimizer state; weights are gathered layer by
          layer as they are used (arXiv:1910.02054)
tensor    each part has its share of the heads, the feed-forward features and the vocabulary (arXiv:1909.08053)
context   each part has its share of every sequence; keys and values go round (arXiv:2310.01889)
expert    each part has its own rows, and its share of the experts of every layer; rows are sent to the devices of their experts
          and back (arXiv:2006.16668)
stage     always 1: layers are not split over devices yet
"""

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.schema import Also
from argosy.core.settings import Settings

if TYPE_CHECKING:
    from jax.sharding import Mesh

# The last axes communicate most, so they get neighboring devices.
ORDER = ("stage", "data", "fsdp", "context", "expert", "tensor")
NOT_BUILT = {"stage": "layers"}


class MeshSettings(Settings):
    """The number of devices along each axis; at most one axis may be -1, which takes all remaining devices."""

    data: Annotated[
        int,
        Also(
            "data_parallel_replicate_degree",
            "dp_replicate",
            "ici_data_parallelism",
            "parallelism.data_parallel_replicate_degree",
        ),
    ] = Field(1, ge=-1)
    """Number of copies of the weights, each with its own rows of the batch."""
    fsdp: Annotated[
        int,
        Also(
            "parallelism.data_parallel_shard_degree",
            "fsdp_config",
            "dp_shard",
            "data_parallel_shard_degree",
            "ici_fsdp_parallelism",
        ),
    ] = Field(-1, ge=-1)
    """Number of shares of weights, gradients and optimizer state, each with its own rows of the batch. Default: all devices,
    because this saves the most memory and communicates well up to a few hundred devices."""
    tensor: Annotated[
        int,
        Also(
            "parallelism.tensor_parallel_degree",
            "tp",
            "tensor_parallel_size",
            "tp_size",
            "tensor_parallel_degree",
            "ici_tensor_parallelism",
        ),
    ] = Field(1, ge=-1)
    """Number of shares of the heads, the feed-forward features and the vocabulary. Raise it if the batch has fewer rows than
    there are devices. It communicates in every layer, so keep it within one machine."""
    context: Annotated[
        int, Also("context_parallel_degree", "ici_context_parallelism", "cp", "sequence_parallel_size")
    ] = Field(1, ge=-1)
    """Number of shares of each sequence, for sequences whose activations do not fit on one device. Keys and values go round the
    devices, so keep it within one machine. `data.sequence` must be a multiple of twice as many."""
    expert: Annotated[int, Also("expert_parallel_degree", "ici_expert_parallelism", "ep")] = Field(1, ge=-1)
    """Number of shares of the experts, each with its own rows of the batch, which are sent to the devices of their experts and back.
    It must divide the number of experts. All other weights are copied along it, so use it beside `mesh.fsdp`, and where a layer's
    experts are more than what is sent of its rows."""
    stage: Annotated[int, Also("pipeline_parallel_degree", "ici_pipeline_parallelism", "pp")] = Field(1, ge=-1)
    """Number of shares of the layers. Only 1 is built."""

    @model_validator(mode="after")
    def _built(self) -> "MeshSettings":
        for name, what in NOT_BUILT.items():
            if (size := getattr(self, name)) != 1:
                hint = f"leave mesh.{name} at 1; mesh.fsdp and mesh.tensor split the weights of every model"
                raise BadInput(f"{name} = {size}: {what} are not split over devices yet", hint=hint)
        sizes = {name: getattr(self, name) for name in ORDER}
        if list(sizes.values()).count(-1) > 1 or 0 in sizes.values():
            shown = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size in (-1, 0))
            raise BadInput(f"{shown}: at most one axis of a mesh may be -1, and none 0", hint="-1 takes all remaining devices")
        return self

    def build(self, devices: Any = None) -> "Mesh":
        """The mesh over these devices, or over all devices of the process.

        Raises:
            BadInput: the sizes do not multiply to the number of devices.
        """
        # Imported here, because settings are read without jax.
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh

        devices = jax.devices() if devices is None else devices
        sizes = {name: getattr(self, name) for name in ORDER}
        open_axes = [name for name, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if open_axes and len(devices) % fixed == 0:
            sizes[open_axes[0]] = len(devices) // fixed
        if math.prod(sizes.values()) != len(devices):
            raise BadInput(
                f"mesh {_shown(sizes)} does not make {plural(len(devices), 'device')}", hint="set one of its axes to -1"
            )
        grid = np.asarray(devices).reshape(tuple(sizes.values()))
        return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _shown(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if name not in NOT_BUILT or size != 1)
