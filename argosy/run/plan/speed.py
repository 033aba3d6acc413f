"""The time of a step from FLOPs and the weights that travel: an estimate in seconds, before anything is compiled.

Work: products at a share of the peak, attention at the share that its kernels reach, and the optimizer at the bandwidth of the memory.
Traffic over a ring: weights are gathered for the forward and the backward pass, beside the work of a layer; gradients are summed after
it, and are not hidden. Layers over `mesh.tensor` sum their activations, which nothing hides.
"""

import math
from dataclasses import dataclass
from typing import Any

from argosy.models.parts.moe.exchange import ROOM
from argosy.observe.hardware import Chip
from argosy.observe.hlo.estimate import ATTENTION, Prices
from argosy.parallel.place import row_shares
from argosy.run.plan.figures import Traffic
from argosy.train.objectives.images.perceptual import PERCEPTUAL

# The share of a large product's speed that the products of a layer reach; on CPUs, of a small product measured here.
PRODUCTS = {"tpu": 0.9, "gpu": 0.9, "cpu": 0.8}
# Seconds of a layer on CPUs for its hundred small instructions, forward and backward; measured, docs/measured.md.
SMALL_S = 3e-3
# Passes over the activations of a layer that are not products, forward and backward: norms, rotations, gates, sums.
PASSES = 40
# Reads and writes of an update with AdamW, in bytes for each parameter in float32.
UPDATE = 28


@dataclass(frozen=True)
class StepWork:
    """The work of a step on a device: seconds by kind, and its traffic."""

    by_kind: dict[str, float]
    traffic: list[Traffic]


def prices_of(chip: Chip) -> Prices:
    """What work costs on a device of this kind."""
    ring = 2 * chip.link_bytes_per_s if chip.axes else chip.link_bytes_per_s
    share = PRODUCTS[chip.platform] * chip.product_share
    return Prices(
        flops_per_s=share * chip.flops_per_s,
        bytes_per_s=0.85 * chip.memory_bytes_per_s,
        ring_bytes_per_s=ring,
        clock_hz=chip.clock_hz,
        peak_flops_per_s=chip.flops_per_s,
        rings=max(1, chip.axes),
    )


def model_flops(assembly: Any) -> float:
    """FLOPs of a step over all devices, as MFU counts them: attention halved where it is causal, nothing for what is computed again."""
    full, config = float(assembly.flops_per_step), assembly.run.model
    if not getattr(config, "causal", False) or not hasattr(config, "mixing_flops"):
        return full
    return full - attention_flops(assembly) / 2


def attention_flops(assembly: Any) -> float:
    """FLOPs of the scores and sums of attention of a step over all devices, in full."""
    run = assembly.run
    return 3.0 * run.data.batch * run.model.mixing_flops(assembly.positions) if hasattr(run.model, "mixing_flops") else 0.0


def work_of(assembly: Any, prices: Prices, host_devices: int | None = None) -> StepWork:
    """The work of a step on each device.

    Args:
        host_devices: devices that are joined by links; None: all.
    """
    run, mesh = assembly.run, assembly.mesh
    size, remat = mesh.size, run.execution.remat
    attention = attention_flops(assembly)
    # Frozen models beside the trained one pass forward alone. The passes of a perceptual net are among the FLOPs of the step.
    forward_only = len(assembly.roles.keys() - {PERCEPTUAL})
    products = (float(assembly.flops_per_step) - attention) * (1 + forward_only / 3)
    # The forward pass of the layers is computed again; kernels of attention keep what they need.
    again = {"none": 0.0, "dots": 0.03, "full": 1 / 3}[remat] * products * _share_of_layers(run.model)
    peak = prices.peak_flops_per_s or prices.flops_per_s
    halved = 0.5 if getattr(run.model, "causal", False) else 1.0
    param_count = sum(
        math.prod(assembly.places.params[a].shard_shape(s.shape)) for a, s in assembly.shapes.params.items() if hasattr(s, "shape")
    )
    seconds = {
        "products": (products + again) / size / prices.flops_per_s,
        "attention": halved * attention / size / (ATTENTION * peak),
        "memory": (UPDATE * param_count + _activation_traffic(assembly)) / prices.bytes_per_s,
    }
    if assembly.target.shares_memory:
        seconds["small instructions"] = SMALL_S * run.accumulate * (getattr(run.model, "layers", 1) or 1)
    return StepWork(seconds, _traffic(assembly, prices, sum(seconds.values())))


def _activation_traffic(assembly: Any) -> float:
    """Bytes of a device's activations that instructions other than products read and write; on CPUs they stay in the cache."""
    run, mesh = assembly.run, assembly.mesh
    if assembly.target.shares_memory:
        return 0.0
    tokens = run.data.batch * run.data.sequence / row_shares(mesh) / mesh.shape["context"]
    sizes = (getattr(run.model, "layers", 0) or 0) * (getattr(run.model, "width", 0) or 0)
    return PASSES * tokens * sizes * assembly.decided.dtype.itemsize


def _share_of_layers(config: Any) -> float:
    """The share of the products that is in layers and not in the head."""
    vocab, width = getattr(config, "vocab", 0) or 0, getattr(config, "width", 0) or 0
    total = config.parameters(active=True) if getattr(config, "moe", None) else config.parameters()
    return max(0.0, 1 - vocab * width / max(total, 1))


def _traffic(assembly: Any, prices: Prices, compute: float) -> list[Traffic]:
    run, mesh = assembly.run, assembly.mesh
    itemsize, parts = assembly.decided.dtype.itemsize, run.accumulate
    whole = {axis: mesh.shape[axis] for axis in ("data", "fsdp", "context", "expert", "tensor", "stage")}
    rings = {axis: prices.rings if n > math.sqrt(mesh.size) else 1 for axis, n in whole.items()}
    out: list[Traffic] = []

    def add(kind: str, axis: str, count: int, size: float, hidden: float, times: float = 1.0) -> None:
        n = whole[axis]
        if n == 1 or not size:
            return
        seconds = times * size * (n - 1) / n / (prices.ring_bytes_per_s * rings[axis])
        exposed = max(0.0, seconds - hidden * compute) if hidden else seconds
        out.append(Traffic(kind, axis, int(size), count, seconds, exposed, 1.0 if hidden else 0.0))

    # Weights that a device has when they are gathered over fsdp.
    places = assembly.places.params | assembly.places.rest
    arrays = {a: s for a, s in (assembly.shapes.params | assembly.shapes.rest).items() if hasattr(s, "shape")}
    local = {a: math.prod(places[a].shard_shape(s.shape)) for a, s in arrays.items()}
    split, moving = (
        sum(n for a, n in local.items() if "fsdp" in _axes(places[a]) and (a in assembly.shapes.params or every)) * whole["fsdp"]
        for every in (True, False)
    )
    trained = sum(local[a] for a in assembly.shapes.params if a in local)
    passes = 1 if run.execution.gather == "once" else 2 * parts
    layers = max(1, getattr(run.model, "layers", 1))
    add("all-gather", "fsdp", passes * 8 * layers, passes * itemsize * split, 0.9)
    # XLA for TPUs scatters gradients along one axis of a 3-D torus, and sums them whole over several (docs/measured.md).
    summed = ("all-reduce", 2.0) if rings["fsdp"] > 2 else ("reduce-scatter", 1.0)
    add(summed[0], "fsdp", 8 * layers * parts, parts * itemsize * moving, 0.0, summed[1])
    add("all-reduce", "data", layers, 4.0 * trained, 0.0, 2.0)
    tokens = run.data.batch * run.data.sequence / row_shares(mesh) / whole["context"]
    width = getattr(run.model, "width", 0) or 0
    again = 2 if run.execution.remat == "full" else 0
    add("all-reduce", "tensor", (4 + again) * layers, (4 + again) * layers * tokens * width * itemsize, 0.0, 2.0)
    heads, size = (getattr(run.model, name, 0) or 0 for name in ("kv_heads", "head_size"))
    add("collective-permute", "context", 3 * layers, 3 * layers * 2 * tokens * heads * size * itemsize * (whole["context"] - 1), 0.5)
    experts = getattr(run.model, "moe", None)
    if experts is not None:
        add("all-to-all", "expert", (4 + again) * layers, (4 + again) * layers * ROOM * tokens * experts.active * width * itemsize, 0.0)
    return out


def _axes(place: Any) -> set[str]:
    return {axis for entry in place.spec if entry for axis in ([entry] if isinstance(entry, str) else entry)}
