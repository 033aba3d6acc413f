"""Meshes of bundles whose programs run on several devices together, each with its shard of the weights.

A program is lowered for a mesh whose devices need not exist. The manifest contains the mesh, and the mesh axes along which each tensor
is split, so that a process reads only its shards. This module knows nothing of models.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from argosy.core.counts import plural
from argosy.core.errors import Unsupported
from argosy.core.settings import Settings
from argosy.core.settings.schema import Also
from argosy.parallel.mesh import ORDER

# Settings are read without jax.
if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, NamedSharding

_COPIES = "several servers hold copies: argosy launch engine=kubernetes replicas=N -- predict REPOSITORY"


class ExportMesh(Settings):
    """The devices that the programs of a bundle run on together."""

    elsewhere: ClassVar = {
        "data": _COPIES,
        "context": "bundles split no sequences; mesh.tensor splits heads",
        "expert": "mesh.tensor splits the features of each expert",
        "stage": "bundles split no layers; mesh.tensor splits what is in them",
    }

    tensor: Annotated[int, Also("tp", "tensor_parallel_size", "tp_size", "tensor_parallel_degree")] = Field(1, ge=1)
    """Number of shares of the heads, the feed-forward features and the vocabulary. It communicates in every layer."""
    fsdp: Annotated[int, Also("dp_shard")] = Field(1, ge=1)
    """Number of shares of weights that are gathered layer by layer as they are used, times `tensor`; rows are split over it too."""

    def sizes(self) -> dict[str, int]:
        """The axes with several devices, outermost first. Empty: one device."""
        return {name: size for name in ORDER if (size := getattr(self, name, 1)) > 1}


def device_count(sizes: Mapping[str, int]) -> int:
    """Returns the number of devices of a mesh; 1 without axes."""
    return math.prod(sizes.values())


def described_mesh(sizes: Mapping[str, int]) -> "AbstractMesh":
    """Returns a mesh of absent devices, for which programs can be lowered."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(tuple(sizes[axis] for axis in _ordered(sizes)), _ordered(sizes), (AxisType.Auto,) * len(sizes))


def device_mesh(sizes: Mapping[str, int], folder: Path) -> "Mesh | None":
    """Builds the mesh of a bundle over the devices of all processes, or over the first devices of a single process. Returns None for
    one device.

    Args:
        sizes: the sizes of the mesh axes.
        folder: the folder of the bundle, for errors.

    Raises:
        Unsupported: the bundle is for another number of devices.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    count, devices, processes = device_count(sizes), jax.devices(), jax.process_count()
    if count > len(devices) or (processes > 1 and count != len(devices)):
        shape = f" ({mesh_text(sizes)})" if sizes else ""
        owner = "this process has" if processes == 1 else f"the {processes} processes have"
        problem = f"its programs are for {plural(count, 'device')}{shape}, and {owner} {len(devices)}"
        raise Unsupported(problem, where=str(folder), hint=_hint(count, devices[0].platform, processes))
    if not sizes:
        return None
    grid = np.array(devices[:count], dtype=object).reshape([sizes[axis] for axis in _ordered(sizes)])
    return Mesh(grid, _ordered(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _hint(count: int, platform: str, processes: int) -> str:
    if processes > 1 and count == 1:
        return "`argosy predict` without `argosy launch` serves it; or export it with mesh.tensor=N for N devices"
    if platform == "cpu" and processes == 1:
        return f"to try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={count}"
    return "export it with mesh.tensor=N for N devices"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Formats a mesh for people, such as fsdp 2 x tensor 4."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in _ordered(sizes))


def _ordered(sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in ORDER if axis in sizes)


def sharding_of(split: Sequence[str | None], mesh: "Mesh | AbstractMesh") -> "NamedSharding":
    """Returns the sharding of an array.

    Args:
        split: the mesh axis over which each axis of the array is split. Empty replicates the array.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*split))


def fits_mesh(split: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether an array of this shape can be split in this way over a mesh of these sizes."""
    if not split:
        return True
    used = [axis for axis in split if axis is not None]
    axes_valid = len(set(used)) == len(used) and all(axis in sizes for axis in used)
    return axes_valid and len(split) == len(shape) and all(axis is None or size % sizes[axis] == 0 for axis, size in zip(split, shape))
