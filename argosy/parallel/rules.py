"""Rules that map logical axes to mesh axes, as data.

The rules for weights are tried in order: a rule applies if the weight has its logical axis, its mesh axis is not used for this
weight yet, and the size is divisible. So a short table shards every family, and another sharding is another table. An activation
is split, axis by axis, over the mesh axes of the logical axis: as many of them from the left as divide its size. Mesh axes that
do not exist are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from argosy.core.dims import LEGEND


@dataclass(frozen=True)
class Rules:
    """weights: (logical axis, mesh axis), tried in order. activations: the mesh axes of each logical axis."""

    weights: tuple[tuple[str, str], ...]
    activations: Mapping[str, tuple[str, ...]]

    def weight(self, axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """How a weight with these logical axes is split over mesh axes of these sizes."""
        out: list[str | None] = [None] * len(axes)
        for logical, physical in self.weights:
            if logical not in axes or physical in out or sizes.get(physical, 1) == 1:
                continue
            i = axes.index(logical)
            if out[i] is None and shape[i] % sizes[physical] == 0:
                out[i] = physical
        return PartitionSpec(*out)

    def activation(self, letters: str, shape: Sequence[Any], sizes: Mapping[str, int]) -> PartitionSpec:
        """How an activation with these letters ("B T D") is split over mesh axes of these sizes."""
        out: list[tuple[str, ...] | None] = []
        taken: set[str] = set()
        for letter, size in zip(letters.split(), shape, strict=True):
            kept, product = [], 1
            for axis in self.activations.get(LEGEND.get(letter, letter), ()):
                n = sizes.get(axis, 1)
                if n > 1 and axis not in taken and isinstance(size, int) and size % (product * n) == 0:
                    kept.append(axis)
                    product *= n
            taken.update(kept)
            out.append(tuple(kept) or None)
        return PartitionSpec(*out)


# Rows are split over `data`, `fsdp` and `expert`. Experts are split over `expert`, and rows are sent to them (GShard,
# arXiv:2006.16668). Weights, gradients and optimizer state are split over `fsdp` and gathered where they are used (FSDP, ZeRO-3,
# arXiv:1910.02054). Heads, features and vocabulary are split over `tensor` (Megatron, arXiv:1909.08053).
DEFAULT = Rules(
    weights=(
        ("experts", "expert"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("ffn", "tensor"),
        ("expert_ffn", "tensor"),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
        ("ffn", "fsdp"),
        ("vocab", "fsdp"),
        ("heads", "fsdp"),
        ("kv_heads", "fsdp"),
    ),
    activations={
        "batch": ("data", "fsdp", "expert"),
        "time": ("context",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "ffn": ("tensor",),
        "expert_ffn": ("tensor",),
        "vocab": ("tensor",),
    },
)


def shardings(
    axes: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]], rules: Rules, mesh: Mesh
) -> dict[str, NamedSharding]:
    """The sharding of every weight, by address."""
    sizes = dict(mesh.shape)
    return {a: NamedSharding(mesh, rules.weight(names, shapes[a], sizes)) for a, names in axes.items()}
