"""Gathers weights once for all micro-batches of a step.

FSDP gathers the weights of each layer before it uses them, and so again for every micro-batch. If they are gathered once instead, they
stay whole on every device through all micro-batches, which costs their memory and saves all gathers but the first. They are whole over
the mesh axes that split rows; other axes still split them. Gradients are reduced over devices after each micro-batch either way, so
each device keeps only its shard of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from argosy.parallel.place import row_axes
from argosy.parallel.scope import gathered_over


@dataclass(frozen=True)
class GatherOnce:
    """Gathers weights once for all micro-batches of a step.

    places: the sharding of each weight in the state, by parameter name.
    """

    places: Mapping[str, NamedSharding]

    def whole(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Gathers weights, {parameter name: array}."""
        return {a: jax.lax.with_sharding_constraint(leaf, self.place(a)) for a, leaf in leaves.items()}

    @contextmanager
    def in_scope(self) -> Iterator[None]:
        """Traces programs inside for gathered weights, so that neither a lookup nor an exchange of rows splits them again."""
        meshes: list[Any] = [place.mesh for place in self.places.values()]
        with gathered_over(frozenset().union(*map(_rows, meshes))):
            yield

    def shares(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Splits the gradients of the weights as the weights are split in the state."""
        return {a: jax.lax.with_sharding_constraint(leaf, self.places[a]) for a, leaf in leaves.items()}

    @property
    def gathers(self) -> bool:
        """Whether any weight is split over more than one device by the axes that split rows."""
        axes = [(place.mesh, axis) for place in self.places.values() for entry in place.spec for axis in _axes(entry)]
        return any(axis in _rows(mesh) and mesh.shape[axis] > 1 for mesh, axis in axes)

    def place(self, address: str) -> NamedSharding:
        sharding = self.places[address]
        mesh: Any = sharding.mesh
        entries = (tuple(axis for axis in _axes(entry) if axis not in _rows(mesh)) for entry in sharding.spec)
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))


def _rows(mesh: Any) -> set[str]:
    return set(row_axes(mesh)) - {"expert"}


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
