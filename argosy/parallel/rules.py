"""From logical axes to mesh axes, as data: an ordered list of preferences.

For each weight the rules are tried in order. One applies where the weight has that logical axis, the mesh axis is not used
for it yet, and its size divides. So a table of five lines shards every family, and a new sharding is an edit of the table.
"""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Sequence[tuple[str, str]]  # (logical axis, mesh axis), most wanted first

FSDP: Rules = (
    ("embed", "fsdp"),
    ("ffn", "fsdp"),
    ("vocab", "fsdp"),
    ("heads", "fsdp"),
    ("kv_heads", "fsdp"),
)


def spec(axes: Sequence[str], shape: Sequence[int], rules: Rules, mesh: Mesh) -> PartitionSpec:
    """How one array is split."""
    out: list[str | None] = [None] * len(axes)
    for logical, physical in rules:
        if logical not in axes or physical in out or mesh.shape[physical] == 1:
            continue
        i = axes.index(logical)
        if out[i] is None and shape[i] % mesh.shape[physical] == 0:
            out[i] = physical
    return PartitionSpec(*out)


def shardings(
    axes: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]], rules: Rules, mesh: Mesh
) -> dict[str, NamedSharding]:
    """Of every weight, by address."""
    return {a: NamedSharding(mesh, spec(names, shapes[a], rules, mesh)) for a, names in axes.items()}
