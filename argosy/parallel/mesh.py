"""The devices as a grid with named axes.

data      each device has all weights and its own rows of the batch
fsdp      each device has its own rows, and its shard of weights, gradients and optimizer state; weights are gathered layer by
          layer when they are used (arXiv:1910.02054)
tensor    each device has its share of the heads, the feed-forward features and the vocabulary (arXiv:1909.08053)
context   each device has its share of every sequence; keys and values are passed around a ring (arXiv:2310.01889)
expert    each device has its own rows, and its share of the experts of every layer; tokens are sent to the devices of their experts
          and back (arXiv:2006.16668)
stage     each device has its share of the layers; micro-batches of the same rows go from stage to stage (arXiv:1811.06965)

Groups of devices (TPU slices, or hosts) may be joined by a slower network. The size of an axis is its size within a group times its
size between groups. The groups are the outer part of each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.core.settings.schema import Also
from argosy.parallel.row_shares import row_positions
from argosy.parallel.rules import DEFAULT, Rules, add_rules

if TYPE_CHECKING:
    from jax.sharding import Mesh

# The order of the axes. The last axes communicate most, so they get neighboring devices.
ORDER = ("stage", "data", "fsdp", "context", "expert", "tensor")
# Axes that messages leave out where their size is 1.
SPECIAL = ("context", "expert", "stage")


def _check(sizes: dict[str, int]) -> None:
    """Raises:
    BadInput: two sizes are -1, or one is 0.
    """
    if list(sizes.values()).count(-1) > 1 or 0 in sizes.values():
        listing = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size in (-1, 0))
        raise BadInput(f"{listing}: at most one axis of a mesh may be -1, and none 0", hint="-1 takes all remaining devices")


class BetweenSettings(Settings):
    """The number of groups of devices along each axis: TPU slices, hosts of GPUs, or processes of CPUs. At most one may be -1, which
    takes all remaining groups. Default: copies of the weights between TPU slices, and no groups elsewhere."""

    data: Annotated[int | None, Also("dcn_data_parallelism")] = Field(None, ge=-1)
    """Number of groups with copies of the weights. None: all TPU slices."""
    fsdp: Annotated[int, Also("dcn_fsdp_parallelism")] = Field(1, ge=-1)
    """Number of groups with shares of weights, gradients and optimizer state, which are then gathered over the slower network."""
    tensor: Annotated[int, Also("dcn_tensor_parallelism")] = Field(1, ge=-1)
    """Number of groups with shares of the heads and features."""
    context: Annotated[int, Also("dcn_context_parallelism")] = Field(1, ge=-1)
    """Number of groups with shares of each sequence."""
    expert: Annotated[int, Also("dcn_expert_parallelism")] = Field(1, ge=-1)
    """Number of groups with shares of the experts."""
    stage: Annotated[int, Also("dcn_pipeline_parallelism")] = Field(1, ge=-1)
    """Number of groups with shares of the layers. Apart from copies of the weights, this communicates least between groups."""

    @model_validator(mode="after")
    def _possible(self) -> "BetweenSettings":
        _check({name: getattr(self, name) for name in ORDER if getattr(self, name) is not None})
        return self

    def resolve(self, groups: int, slices: bool) -> dict[str, int]:
        """The number of groups along each axis.

        Args:
            groups: number of groups of devices.
            slices: whether they are TPU slices.

        Raises:
            BadInput: the sizes do not multiply to the groups.
        """
        sizes = {name: getattr(self, name) for name in ORDER}
        others = math.prod(size for size in sizes.values() if size not in (None, -1))
        if sizes["data"] is None:
            sizes["data"] = groups // others if slices and -1 not in sizes.values() and groups % others == 0 else 1
        counted = plural(groups, "slice") if slices else "1 process" if groups == 1 else f"{groups} processes"
        return _filled(sizes, groups, "mesh.between", counted)


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
    """Number of shares of each sequence, for sequences whose activations do not fit on one device. Keys and values are passed around
    the devices, so keep it within one machine. `data.sequence` must be a multiple of twice this number.
    """
    expert: Annotated[int, Also("expert_parallel_degree", "ici_expert_parallelism", "ep")] = Field(1, ge=-1)
    """Number of shares of the experts, each with its own rows of the batch, whose tokens are sent to the devices of their experts and
    back. It must divide the number of experts. All other weights are copied along it, so use it beside `mesh.fsdp`, and if a layer's
    experts are larger than the tokens that are sent.
    """
    stage: Annotated[int, Also("pipeline_parallel_degree", "ici_pipeline_parallelism", "pp")] = Field(1, ge=-1)
    """Number of shares of the layers, with their gradients and optimizer state (pipeline parallelism). Rows pass through them in
    `execution.microbatches`. It communicates least, so it may span machines.
    """

    between: BetweenSettings = BetweenSettings()
    """The same axes between groups of devices that are connected by a slower network."""
    rules: list[str] = Field([])
    """Sharding rules from axes of weights to mesh axes, tried in order before the built-in rules: `vocab:fsdp`. `vocab:none` leaves the
    vocabulary unsharded. Built-in rules do not apply to a weight axis that is named here.
    """

    @model_validator(mode="after")
    def _possible(self) -> "MeshSettings":
        _check({name: getattr(self, name) for name in ORDER})
        return self

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: list[str]) -> list[str]:
        try:
            add_rules(DEFAULT, rules, ORDER)
        except BadInput as error:
            # The reader then names this setting, and not those that the rule mentions.
            raise ValueError(f"{error.what}; {error.hint}") from None
        return rules

    def table(self) -> Rules:
        """The built-in rules, changed as `rules` says."""
        return add_rules(DEFAULT, self.rules, ORDER)

    @property
    def is_between(self) -> bool:
        """Whether sizes between groups of devices are set."""
        return any(getattr(self.between, name) not in (None, 1) for name in ORDER)

    def splits(self, axis: str) -> bool:
        """Whether several parts along an axis are asked for, or all remaining ones."""
        return getattr(self, axis) != 1 or getattr(self.between, axis) not in (None, 1)

    def shares(self, axis: str) -> int:
        """The parts along an axis that are asked for in numbers."""
        return max(getattr(self, axis), 1) * max(getattr(self.between, axis) or 1, 1)

    def rows(self) -> dict[str, int]:
        """The sizes that are set of the axes that split rows, with their names."""
        inside = {f"mesh.{name}": getattr(self, name) for name in DEFAULT.activations["batch"] if name != "stage"}
        outside = {f"mesh.between.{name}": getattr(self.between, name) for name in DEFAULT.activations["batch"] if name != "stage"}
        return {name: size for name, size in (inside | outside).items() if size is not None and size > 1}

    def resolve(self, each: int, groups: int, slices: bool) -> tuple[dict[str, int], dict[str, int]]:
        """The sizes within each group of devices, and between groups.

        Args:
            each: devices of a group.
            groups: number of groups.
            slices: whether groups are TPU slices.

        Raises:
            BadInput: the sizes do not multiply to them.
        """
        between = self.between.resolve(groups, slices)
        counted = plural(each, "device") + ((" of each slice" if slices else " of each process") if groups > 1 else "")
        return _filled({name: getattr(self, name) for name in ORDER}, each, "mesh", counted), between

    def build(self, devices: Any = None) -> "Mesh":
        """The mesh over these devices, or over all devices of the process.

        Raises:
            BadInput: the sizes do not multiply to the number of devices.
        """
        # Imported here, because settings are read without jax.
        import jax
        from jax.sharding import AxisType, Mesh

        devices = list(jax.devices() if devices is None else devices)
        groups, slices = device_groups(devices, self.between)
        sizes, between = self.resolve(len(groups[0]), len(groups), slices)
        grid = _arranged(groups, tuple(sizes.values()), tuple(between.values()))
        return Mesh(grid, ORDER, axis_types=(AxisType.Auto,) * len(ORDER))


def device_groups(devices: Sequence[Any], between: BetweenSettings) -> tuple[list[list[Any]], bool]:
    """Returns the groups of devices that a slower network joins, and whether they are slices. jax calls TPU slices so, and every host
    of GPUs. If sizes between groups are set, the groups are slices if there are several, else processes. Otherwise only TPU slices are
    groups.

    Raises:
        BadInput: the groups have different sizes.
    """
    slices, processes = ({getattr(d, name, 0) or 0 for d in devices} for name in ("slice_index", "process_index"))
    is_set = any(getattr(between, name) not in (None, 1) for name in ORDER)
    several = len(slices) > 1
    if not is_set and not (several and devices[0].platform == "tpu"):
        return [list(devices)], False
    name = "slice_index" if several else "process_index"
    groups = [[d for d in devices if (getattr(d, name, 0) or 0) == key] for key in sorted(slices if several else processes)]
    if len({len(group) for group in groups}) > 1:
        problem = f"{'slices' if several else 'processes'} have different numbers of devices: {', '.join(str(len(g)) for g in groups)}"
        raise BadInput(problem, hint="leave mesh.between out" if not several else "give each slice as many devices")
    return groups, several


def _arranged(groups: Sequence[Sequence[Any]], inside: tuple[int, ...], between: tuple[int, ...]) -> Any:
    """Arranges devices as a grid, in which groups are the outer part of each axis. Neighbors on the physical torus of TPUs are
    neighbors along the last axes. If processes would then share some of their rows and not others, devices are in jax's order instead.

    Args:
        groups: the devices of each group.
        inside, between: the size of each axis within a group and between groups.
    """
    import numpy as np
    from jax.experimental import mesh_utils

    def grid(of_group: Callable[[Sequence[Any]], Any]) -> Any:
        blocks = np.empty(len(groups), dtype=object)
        for i, group in enumerate(groups):
            blocks[i] = of_group(group)
        return np.block(blocks.reshape(between).tolist())

    torus = grid(lambda group: mesh_utils.create_device_mesh(inside, list(group), allow_split_physical_axes=True))
    return torus if rows_divide(torus) else grid(lambda group: np.asarray(group, dtype=object).reshape(inside))


def rows_divide(grid: Any) -> bool:
    """Whether each process of a grid of devices reads exactly one share of the rows of a batch (`parallel.row_shares`)."""
    rows = [axis for axis in DEFAULT.activations["batch"] if axis != "stage"]
    return row_positions(grid, ORDER, rows).divide


def _filled(sizes: dict[str, int], count: int, name: str, counted: str) -> dict[str, int]:
    """Returns the sizes with the remaining factor in place of -1.

    Args:
        count: the product that the sizes must have.
        name: the name of the sizes, for errors.
        counted: the count with its noun, such as "8 devices", for errors.

    Raises:
        BadInput: the sizes do not multiply to `count`.
    """
    sizes, fixed = dict(sizes), math.prod(size for size in sizes.values() if size != -1)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if open_axes and count % fixed == 0:
        sizes[open_axes[0]] = count // fixed
    if math.prod(sizes.values()) != count:
        if open_axes:
            problem = f"{name} {_format_sizes(sizes)}: {fixed} does not divide {counted}, so nothing is left for {open_axes[0]}"
            trial = f"XLA_FLAGS=--xla_force_host_platform_device_count={fixed}"
            hint = f"sizes whose product divides {count}; to try it on a CPU, {trial} makes {fixed} devices"
            raise BadInput(problem, hint=hint)
        raise BadInput(f"{name} {_format_sizes(sizes)} does not make {counted}", hint="set one of its axes to -1")
    return sizes


def _format_sizes(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if name not in SPECIAL or size != 1)
