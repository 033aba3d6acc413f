"""Fused head and cross-entropy, by blocks of the vocabulary, for rows and weights that are split over devices.

    forward    for each block: logits [R C] of the device's own rows, which update a running maximum, sum and the target's logit
    backward   for each block: logits again, p - onehot, and the block's part of the gradients of x and of the head

Each block of the head is gathered when it is used, and its gradient is reduce-scattered at once. A step therefore gathers the head
twice and reduces its gradient once, however many rows there are, and no device ever holds a whole head or a whole gradient. A loop over
rows would do both for each chunk of rows: 512 times for 128 sequences of 4,096 tokens on 64 devices, in chunks of 16 rows per device.
Logits are computed twice, as with checkpointing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.ops.matmul import matmul
from argosy.ops.precision import sums_in
from argosy.parallel.scope import axes_in, axis_sizes

Losses = tuple[Float[Array, "B T"], Float[Array, "B T"]]
# The number of columns of a block is a multiple of this, the width of a matrix unit.
LANES = 128
# The id of a column that belongs to another block. No target equals it.
NOBODY = np.iinfo(np.int32).min


class HeadLayout(NamedTuple):
    """How the arrays are split over the mesh in scope, and further constants of the call.

    rows: the split of targets [B T].
    weight: the split of the head's weight.
    order: the axes of the head's weight, "VD" (a tied embedding) or "DV".
    chunk: a bound on memory. A block of logits may have as many numbers as this number of rows over the whole vocabulary.
    cap: the soft cap, cap * tanh(logits / cap). None: no cap.
    """

    rows: PartitionSpec
    weight: PartitionSpec
    order: str
    chunk: int
    cap: float | None = None

    def axis(self, letter: str) -> str | None:
        """Returns the mesh axis that splits axis D or V of the head. None: that axis is not split."""
        entry = tuple(self.weight)[self.order.index(letter)] if len(self.weight) else None
        return entry if entry is None or isinstance(entry, str) else entry[0]

    def shares_rows(self, axis: str | None) -> bool:
        """Whether devices along a mesh axis have different rows."""
        return axis in axes_in(self.rows)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def vocabulary_scan(x: Float[Array, "B T D"], w: Float[Array, "..."], targets: Int[Array, "B T"], layout: HeadLayout) -> Losses:
    """Computes the loss of each target and the log of the partition function, in float32. `w` is the weight of the head."""
    return _forward(x, w, targets, layout)[0]


def _forward(x: Array, w: Array, targets: Array, layout: HeadLayout) -> tuple[Losses, Any]:
    three = PartitionSpec(*layout.rows, None)
    run = _on_devices(partial(_local_losses, layout), (three, layout.weight, layout.rows), (layout.rows, layout.rows))
    nll, lse = run(x, w, targets)
    return (nll, lse), (x, w, targets, lse)


def _backward(layout: HeadLayout, residuals: Any, g: Losses) -> Any:
    x, w, targets, lse = residuals
    three = PartitionSpec(*layout.rows, None)
    specs = (three, layout.weight, *[layout.rows] * 4)
    run = _on_devices(partial(_local_gradients, layout), specs, (three, layout.weight))
    dx, dw = run(x, w, targets, lse, *g)
    return dx, dw, np.zeros(targets.shape, jax.dtypes.float0)


vocabulary_scan.defvjp(_forward, _backward)


def _on_devices(local: Any, in_specs: tuple[PartitionSpec, ...], out: tuple[PartitionSpec, ...]) -> Any:
    """Wraps `local` in a `shard_map` if there are several devices."""
    names = frozenset(axis_sizes())
    if max(axis_sizes().values(), default=1) == 1:
        return local
    return jax.shard_map(local, in_specs=in_specs, out_specs=out, axis_names=names, check_vma=False)


class _Blocks(NamedTuple):
    """The head as one device reads it, in blocks of columns.

    w: the device's shard of the head, [V D] or [D V].
    size: the number of the device's own columns in a block.
    number: the number of blocks.
    """

    w: Array
    layout: HeadLayout
    size: int
    number: int

    def at(self, i: Array) -> tuple[Array, Int[Array, "C"]]:
        """Gathers block i. Also returns the ids of its columns, with `NOBODY` for columns that belong to another block."""
        layout, columns = self.layout, self.columns()
        first = jnp.minimum(i * self.size, columns - self.size)
        block = jax.lax.dynamic_slice_in_dim(self.w, first, self.size, layout.order.index("V"))
        at = first + jnp.arange(self.size)
        axis = layout.axis("V")
        ids = jnp.where(at >= i * self.size, at + (0 if axis is None else jax.lax.axis_index(axis) * columns), NOBODY)
        if (inner := layout.axis("D")) is not None:
            block = jax.lax.all_gather(block, inner, axis=layout.order.index("D"), tiled=True)
        if axis is not None and layout.shares_rows(axis):
            block = jax.lax.all_gather(block, axis, axis=layout.order.index("V"), tiled=True)
            ids = jax.lax.all_gather(ids, axis, tiled=True)
        return block, ids

    def columns(self) -> int:
        return self.w.shape[self.layout.order.index("V")]

    def summed(self, block: Array) -> Array:
        """Reduces the gradient of a gathered block over devices with different rows. Returns this device's columns and features."""
        layout = self.layout
        for letter in ("V", "D"):
            axis, dim = layout.axis(letter), layout.order.index(letter)
            if axis is None:
                continue
            if layout.shares_rows(axis):
                block = jax.lax.psum_scatter(block, axis, scatter_dimension=dim, tiled=True)
            elif letter == "D":
                # Devices along this axis have the same rows, and therefore the same gradient.
                share = block.shape[dim] // jax.lax.axis_size(axis)
                block = jax.lax.dynamic_slice_in_dim(block, jax.lax.axis_index(axis) * share, share, dim)
        return block


def _blocks(layout: HeadLayout, w: Array, rows: int, dtype: Any) -> _Blocks:
    columns = w.shape[layout.order.index("V")]
    size = -(-columns // max(1, -(-rows // layout.chunk)))
    size = min(columns, -(-size // LANES) * LANES)
    return _Blocks(w.astype(dtype), layout, size, -(-columns // size))


def _logits(layout: HeadLayout, x: Array, block: Array, ids: Array) -> tuple[Array, Array | None]:
    """Computes a block's logits [R C], with -inf for columns of other blocks. Also returns the derivative of the soft cap, if any."""
    logits, slope = matmul(x, block, 1, layout.order.index("D"), dtype=sums_in(x.dtype)), None
    if layout.cap is not None:
        share = jnp.tanh(logits / layout.cap)
        logits, slope = layout.cap * share, 1 - share * share
    return jnp.where(ids >= 0, logits, -jnp.inf), slope


def _local_losses(layout: HeadLayout, x: Array, w: Array, targets: Array) -> Losses:
    rows, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    head = _blocks(layout, w, len(rows), x.dtype)

    def body(carry: tuple[Array, Array, Array], i: Array) -> Any:
        top, total, right = carry
        block, ids = head.at(i)
        logits, _ = _logits(layout, rows, block, ids)
        higher = jnp.maximum(top, jnp.max(logits, -1))
        total = total * jnp.exp(top - higher) + jnp.sum(jnp.exp(logits - higher[:, None]), -1)
        return (higher, total, right + jnp.sum(jnp.where(ids == flat_targets[:, None], logits, 0), -1)), None

    dtype = sums_in(x.dtype)
    # The lowest finite number instead of -inf, because -inf minus -inf is NaN.
    nothing = jnp.zeros(len(rows), dtype)
    start = jnp.full_like(nothing, jnp.finfo(dtype).min), nothing, nothing
    (top, total, right), _ = jax.lax.scan(body, start, jnp.arange(head.number))
    axis = layout.axis("V")
    if axis is not None and not layout.shares_rows(axis):
        highest = jax.lax.pmax(top, axis)
        total, right = jax.lax.psum((total * jnp.exp(top - highest), right), axis)
        top = highest
    lse = top + jnp.log(total)
    return (lse - right).reshape(targets.shape), lse.reshape(targets.shape)


def _local_gradients(
    layout: HeadLayout, x: Array, w: Array, targets: Array, lse: Array, of_nll: Array, of_lse: Array
) -> tuple[Array, Array]:
    """Computes gradients, with d loss / d logits = (g_nll + g_lse) p - g_nll onehot(target)."""
    rows, flat_targets, lse = x.reshape(-1, x.shape[-1]), targets.reshape(-1), lse.reshape(-1, 1)
    every, right = (of_nll + of_lse).reshape(-1, 1), of_nll.reshape(-1, 1)
    head = _blocks(layout, w, len(rows), x.dtype)
    v = layout.order.index("V")

    def body(carry: tuple[Array, Array], i: Array) -> Any:
        dx, dw = carry
        block, ids = head.at(i)
        logits, slope = _logits(layout, rows, block, ids)
        pull = every * jnp.exp(logits - lse) - jnp.where(ids == flat_targets[:, None], right, 0)
        pull = (pull if slope is None else pull * slope).astype(x.dtype)
        dx = dx + matmul(pull, block, 1, v, dtype=dx.dtype)
        pair = (pull, rows) if v == 0 else (rows, pull)
        part = head.summed(matmul(*pair, 0, 0, dtype=sums_in(x.dtype)).astype(x.dtype))
        first = jnp.minimum(i * head.size, head.columns() - head.size)
        # If a block overlaps the previous one, its gradient is zero there.
        part = part.astype(dw.dtype) + jax.lax.dynamic_slice_in_dim(dw, first, head.size, v)
        return (dx, jax.lax.dynamic_update_slice_in_dim(dw, part, first, v)), None

    begin = jnp.zeros(rows.shape, sums_in(x.dtype)), jnp.zeros(w.shape, sums_in(w.dtype))
    (dx, dw), _ = jax.lax.scan(body, begin, jnp.arange(head.number))
    axes = {layout.axis("V"), layout.axis("D")}
    if others := tuple(sorted(axes_in(layout.rows) - axes)):
        dw = jax.lax.psum(dw, others)
    axis = layout.axis("V")
    if axis is not None and not layout.shares_rows(axis):
        dx = jax.lax.psum(dx, axis)
    return dx.astype(x.dtype).reshape(x.shape), dw.astype(w.dtype)
