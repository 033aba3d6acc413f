"""Attention kernels on a mesh: each device computes its own rows and heads, since XLA cannot split a kernel by itself.

The rules in scope split rows as they split a batch, and heads as they split query heads. If heads are split over more devices than
there are key heads, each key head is copied to the devices that need it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, on_several_devices

# A function (q, k, v, segments, sinks) that returns the output, or (output, log-sum-exp).
Kernel = Callable[[Array, Array, Array, Array | None, Array | None], Any]


def split_over_mesh(
    kernel: Kernel,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    segments: Int[Array, "B T"] | Int[Array, "B T 2"] | None,
    sinks: Float[Array, "N"] | None,
    *,
    lse: bool = False,
) -> Any:
    """Runs a kernel on the devices of the mesh in scope, each with its own rows and heads.

    Args:
        segments: the segment of each token, or [B T 2] with the segment that is its prefix as well.
        lse: whether the kernel returns (output, log-sum-exp).
    """
    if not on_several_devices():
        return kernel(q, k, v, segments, sinks)
    rows, _, heads, _ = activation_spec("B T N H", q.shape)
    copies = 1 if k.shape[2] % _devices(q) == 0 else _devices(q) // k.shape[2]
    if copies > 1:
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    spec = PartitionSpec(rows, None, heads, None)
    places = (spec, spec, spec, PartitionSpec(rows, None), PartitionSpec(heads))
    out = (spec, PartitionSpec(rows, None, heads)) if lse else spec
    return jax.shard_map(kernel, in_specs=places, out_specs=out, check_vma=False)(q, k, v, segments, sinks)


def cannot_split(q: Array, k: Array) -> str | None:
    """Returns why the devices of the mesh in scope cannot split this call. None: they can."""
    if not on_several_devices():
        return None
    if activation_spec("B T N H", q.shape)[1]:
        return "needs whole sequences on each device, and `mesh.context` splits them"
    K, n = k.shape[2], _devices(q)
    return None if K % n == 0 or n % K == 0 else f"needs key heads that the devices share, and {n} do not share {K}"


def _devices(q: Array) -> int:
    """The number of devices over which heads are split."""
    sizes = axis_sizes()
    return math.prod(sizes[axis] for axis in axes_in(PartitionSpec(activation_spec("B T N H", q.shape)[2])))
