"""The mesh in scope. It decides how a program shards activations and which platform the program is compiled for.

    with scope(mesh):                       a step is traced and run under its mesh
        x = constrain(x, "B T D")           shards an activation by the letters of its axes; models say nothing else about sharding
        platform()                          "cpu", "gpu" or "tpu": the platform of the mesh's devices, which may be absent

Without a mesh, or on one device, `constrain` does nothing. Rules are read when a program is traced, so a jitted function must not be
traced under two tables of rules on the same mesh.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from argosy.core.dims import LEGEND
from argosy.parallel.rules import DEFAULT, Rules

_rules: ContextVar[Rules] = ContextVar("rules", default=DEFAULT)
_gathered: ContextVar[frozenset[str]] = ContextVar("gathered", default=frozenset())


@contextmanager
def scope(mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT) -> Iterator[Mesh | AbstractMesh]:
    """Sets the mesh and the rules for programs that are traced inside. Under an abstract mesh, programs can only be traced."""
    token = _rules.set(rules)
    try:
        with jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh):
            yield mesh
    finally:
        _rules.reset(token)


@contextmanager
def gathered_over(axes: frozenset[str]) -> Iterator[None]:
    """Traces programs inside for weights that are whole over these mesh axes although the rules split them (`gather.GatherOnce`)."""
    token = _gathered.set(axes)
    try:
        yield
    finally:
        _gathered.reset(token)


def axis_sizes() -> dict[str, int]:
    """Returns the sizes of those axes of the mesh in scope that XLA may split over; empty inside a `shard_map` over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {name: size for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types) if kind != AxisType.Manual}


def on_several_devices() -> bool:
    """Whether the mesh in scope has more than one device that XLA may split arrays over."""
    return max(axis_sizes().values(), default=1) > 1


def splits(logical: str) -> bool:
    """Whether the mesh in scope may split this logical axis of activations, such as `time`."""
    sizes = axis_sizes()
    return any(sizes.get(axis, 1) > 1 for axis in _rules.get().activations.get(logical, ()))


def activation_spec(letters: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition of an activation over the mesh in scope. `letters`: the letters of its axes, such as "B T D"."""
    return _rules.get().activation(letters, shape, axis_sizes())


def axes_in(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes that a partition names."""
    return frozenset(axis for axes in spec if axes for axis in ([axes] if isinstance(axes, str) else axes))


def weight_spec(axes: tuple[str, ...], shape: tuple[int, ...], only: frozenset[str]) -> PartitionSpec:
    """Returns the partition of a weight over the axes `only` of the mesh in scope. Over the other axes the weight is gathered."""
    spec, only = _rules.get().weight(axes, shape, axis_sizes()), only - _gathered.get()
    return PartitionSpec(*(axis if axis in only else None for axis in spec))


def constrain(x: Array, letters: str) -> Array:
    """Constrains the sharding of x over the mesh in scope to that of the rules for its letters, such as "B T D".

    Without this, XLA may contract over a width that the weights are split over, and then all-reduce activations of the whole batch
    (docs/log).
    """
    spec = activation_spec(letters, x.shape)
    if all(axes is None for axes in spec):
        return x
    # XLA decides about axes whose size is not divisible (the one row of a sample). Axes without a rule stay unsplit.
    free = [LEGEND.get(letter, letter) in _rules.get().activations for letter in letters.split()]
    entries = [PartitionSpec.UNCONSTRAINED if f and axes is None else axes for axes, f in zip(spec, free)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def gathered_weight(w: Array, axes: tuple[str, ...], rows: Array) -> Array:
    """Gathers a weight over the mesh axes that split the rows, as FSDP does before use. XLA does so by itself before a matrix product,
    but for a lookup it would replicate the result instead.

    Args:
        axes: the logical axes of the weight.
        rows: the array [B T] that is looked up.
    """
    mine = axes_in(activation_spec("B T", rows.shape)) if rows.ndim == 2 else frozenset()
    if not mine:
        return w
    return jax.lax.with_sharding_constraint(w, weight_spec(axes, w.shape, frozenset(axis_sizes()) - mine))


def platform() -> str:
    """Returns the platform that the traced program is compiled for: cpu, gpu or tpu. It is that of the mesh in scope, else of jax's
    default device, else jax's default backend. The devices of a mesh may be a mere description."""
    device = _device()
    if device is None:
        return _plain(jax.default_backend())
    return _plain(device.split(":")[0] if isinstance(device, str) else device.platform)


def device_kind() -> str:
    """Returns the vendor's name of the devices that the traced program is compiled for, such as "TPU v5 lite"; "" if only their
    platform is known.
    """
    device = _device()
    if device is None:
        device = jax.devices()[0]
    return "" if isinstance(device, str) else device.device_kind


def default_device() -> Any:
    """Returns the device of arrays that are not committed to a device."""
    return jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]


def _device() -> Any:
    """Returns the device that programs are compiled for, or the name of its platform; None stands for jax's default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else getattr(mesh, "abstract_device", None)
    if device is not None and device.platform:
        return device
    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]


def _plain(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
