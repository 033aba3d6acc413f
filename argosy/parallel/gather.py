"""Weights gathered once for all parts of a batch.

FSDP gathers each layer's weights before it uses them, and so again for every part of a batch that is computed in parts. Gathered once,
they stay whole on every device through all parts (over the axes that split rows; other axes go on splitting them), which costs their
memory and saves all gathers but the first. Gradients are summed over devices part by part either way, so each device keeps its share.
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
    """Gathers weights once for all parts of a batch.

    places: how weights lie in the state, by address.
    """

    places: Mapping[str, NamedSharding]

    def whole(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The weights, gathered."""
        return {a: jax.lax.with_sharding_constraint(leaf, self.place(a)) for a, leaf in leaves.items()}

    @contextmanager
    def in_scope(self) -> Iterator[None]:
        """Programs traced inside take weights as gathered: no lookup and no exchange of rows splits them again."""
        meshes: list[Any] = [place.mesh for place in self.places.values()]
        with gathered_over(frozenset().union(*map(_rows, meshes))):
            yield

    def shares(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Their gradients, split as the weights are in the state."""
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
