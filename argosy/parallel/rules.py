"""Rules that map logical axes to mesh axes, as data.

The rules for weights are tried in order. A rule applies if the weight has its logical axis, its mesh axis is not used for this weight
yet, and the size is divisible. So a short table shards every model family, and another sharding is another table. For activations, the
table lists the mesh axes of each logical axis. An axis is split over the longest prefix of this list whose product divides its size.
Mesh axes that do not exist are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from argosy.core.dims import LEGEND
from argosy.core.errors import BadInput

# Settings contain rules, and are read without jax.
if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Rules:
    """Sharding rules.

    weights: the rules for weights, (logical axis, mesh axis), in the order in which they are tried.
    activations: the mesh axes that split each logical axis of activations.
    """

    weights: tuple[tuple[str, str], ...]
    activations: Mapping[str, tuple[str, ...]]

    def weight(self, axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> "PartitionSpec":
        """Returns the partition of a weight.

        Args:
            axes, shape: the logical axes and the shape of the weight.
            sizes: the sizes of the mesh axes.
        """
        from jax.sharding import PartitionSpec

        out: list[str | None] = [None] * len(axes)
        for logical, physical in self.weights:
            if logical not in axes or physical in out or sizes.get(physical, 1) == 1:
                continue
            i = axes.index(logical)
            if out[i] is None and shape[i] % sizes[physical] == 0:
                out[i] = physical
        return PartitionSpec(*out)

    def activation(self, letters: str, shape: Sequence[Any], sizes: Mapping[str, int]) -> "PartitionSpec":
        """Returns the partition of an activation.

        Args:
            letters, shape: the letters of the axes ("B T D") and the shape of the activation.
            sizes: the sizes of the mesh axes.
        """
        from jax.sharding import PartitionSpec

        out: list[tuple[str, ...] | None] = []
        used: set[str] = set()
        for letter, size in zip(letters.split(), shape, strict=True):
            axes, product = [], 1
            for axis in self.activations.get(LEGEND.get(letter, letter), ()):
                n = sizes.get(axis, 1)
                if n > 1 and axis not in used and isinstance(size, int) and size % (product * n) == 0:
                    axes.append(axis)
                    product *= n
            used.update(axes)
            out.append(tuple(axes) or None)
        return PartitionSpec(*out)


# Rows are split over `data`, `fsdp` and `expert`. Experts are split over `expert`, and rows are sent to them (GShard,
# arXiv:2006.16668). Weights, gradients and optimizer state are split over `fsdp` and gathered where they are used (FSDP, ZeRO-3,
# arXiv:1910.02054). Heads, features and vocabulary are split over `tensor` (Megatron, arXiv:1909.08053). Stacked layers are split
# over `stage`, where each stage runs its own layers (`models.parts.stack.pipeline`). Before and after the layers, rows are split over
# `stage` too, so that no stage repeats the work of another on embeddings and logits.
DEFAULT = Rules(
    weights=(
        ("layers", "stage"),
        ("experts", "expert"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("delta_heads", "tensor"),
        ("ffn", "tensor"),
        ("mtp_input", "tensor"),
        ("expert_ffn", "tensor"),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
        ("ffn", "fsdp"),
        ("vocab", "fsdp"),
        ("heads", "fsdp"),
        ("kv_heads", "fsdp"),
        ("delta_heads", "fsdp"),
        ("channels_out", "fsdp"),
    ),
    activations={
        "batch": ("data", "fsdp", "expert", "stage"),
        "time": ("context",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "delta_heads": ("tensor",),
        "ffn": ("tensor",),
        "expert_ffn": ("tensor",),
        "vocab": ("tensor",),
    },
)


# Logical axes whose split cannot be chosen, because each device computes its own layers and experts.
FIXED = ("layers", "experts")


def add_rules(rules: Rules, custom: Sequence[str], mesh_axes: Sequence[str]) -> Rules:
    """Puts a user's own rules for weights before the built-in ones, which no longer apply to the logical axes that the user names.

    Args:
        rules: the built-in rules.
        custom: the user's rules, each "LOGICAL:MESH". "LOGICAL:none" leaves the axis unsharded.
        mesh_axes: the names of the mesh axes.

    Raises:
        BadInput: a rule is malformed, or names an axis that does not exist or whose sharding is fixed.
    """
    pairs: list[tuple[str, str]] = []
    logical_axes = sorted({*LEGEND.values(), *(logical for logical, _ in DEFAULT.weights)} - set(FIXED))
    for text in custom:
        logical, _, physical = (part.strip() for part in text.partition(":"))
        if logical in FIXED:
            axis = dict(rules.weights)[logical]
            raise BadInput(f"`{text}`: mesh.{axis} alone splits `{logical}`", hint=f"leave it out; mesh.{axis}=N splits them")
        if logical not in logical_axes:
            near = get_close_matches(logical, logical_axes, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"axes of weights: {', '.join(logical_axes)}"
            raise BadInput(f"`{text}`: no axis of weights is called `{logical}`", hint=hint)
        if physical not in (*mesh_axes, "none"):
            raise BadInput(f"`{text}`: the mesh has no axis `{physical}`", hint=f"{', '.join(mesh_axes)}, or none")
        pairs.append((logical, physical))
    custom_axes = {logical for logical, _ in pairs}
    builtin = tuple((logical, physical) for logical, physical in rules.weights if logical not in custom_axes)
    return replace(rules, weights=(*((a, b) for a, b in pairs if b != "none"), *builtin))


def shardings(
    axes: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]], rules: Rules, mesh: "Mesh | AbstractMesh"
) -> "dict[str, NamedSharding]":
    """Returns the sharding of every weight, by parameter name.

    Args:
        axes: the logical axes of each weight.
        shapes: the shape of each weight.
    """
    from jax.sharding import NamedSharding

    sizes = dict(mesh.shape)
    return {a: NamedSharding(mesh, rules.weight(names, shapes[a], sizes)) for a, names in axes.items()}
