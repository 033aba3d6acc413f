"""Weights packed for small products on a CPU, and their product with data.

XLA:CPU multiplies 8 rows with a weight at 54 GFLOP/s on the machine of docs/log, this at 110; a single row at the speed of memory
in both. Columns are kept in panels of 32, in which the summed axis is the slow one, so a product reads a weight front to back once,
whatever the number of rows. Weights that bfloat16 holds exactly (a published bfloat16 file) are kept in it: half the memory and, for
few rows, half the time, with the same result. Weights of few bits (`ops.native.blocks`) are kept as their codes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from argosy.core.errors import Unsupported
from argosy.ops.native.codes import NUMBERS, PANEL, CodeFormat, some_codes

# Smaller weights stay as they are: a call costs as much as their product.
SMALLEST = 1 << 14
# The longest block whose sums of products of eight bits fit in 32 bits: 255 * 128 of each.
LONGEST = 1 << 15


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A weight, packed.

    values: [panels, summed, PANEL] float32 or bfloat16; zeros fill up the last panel. With scales they are codes, uint8, as
        `ops.native.codes` lays them out.
    shape: of the array whose place it takes. inner: how many of the weight's axes are summed; first: whether these come first.
    dtype: of the weight as it was given.
    scale, minimum: [panels, blocks, PANEL] float32 of blocks along the summed axis: w = scale * number - minimum.
    code: what codes stand for.
    activations: rounds the data of a product (`adapt.formats.activations`); None: it is not rounded, or as its owner says.
    unpacked: the shape of the weight, where several of its codes shared an element of the array; None: `shape`.
    experts: how many matrices there are along the first axis, whose panels lie one after another; 0: the weight is one matrix. `inner`
        and `first` are about the axes of a matrix.
    """

    values: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    inner: int = field(metadata={"static": True})
    first: bool = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    scale: Any = None
    minimum: Any = None
    code: CodeFormat = field(default=CodeFormat(8), metadata={"static": True})
    unpacked: tuple[int, ...] | None = field(default=None, metadata={"static": True})
    activations: Any = field(default=None, metadata={"static": True})
    experts: int = field(default=0, metadata={"static": True})

    def __getitem__(self, index: Any) -> "Panels":
        """Itself, for `weight[...]`."""
        if index is not Ellipsis:
            raise TypeError("a packed weight has no slices")
        return self

    @property
    def sharding(self) -> Any:
        """Where it lies, as of the weight."""
        return self.values.sharding

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in jax.tree.leaves(self))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.unpacked or self.shape

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes of the axes that a product keeps; of experts those of one."""
        sizes = self.sizes[1:] if self.experts else self.sizes
        return sizes[self.inner :] if self.first else sizes[: len(sizes) - self.inner]

    @property
    def summed(self) -> int:
        """The numbers of a column."""
        return math.prod(self.sizes) // math.prod(self.kept) // max(self.experts, 1)

    def dense(self) -> Array:
        """The weight."""
        if self.experts:
            return jax.vmap(Panels.dense)(self._by_expert())
        if self.scale is None:
            panels, summed, _ = self.values.shape
            flat = self.values.transpose(0, 2, 1).reshape(panels * PANEL, summed)[: math.prod(self.kept)]
        else:
            flat = self._columns(jnp.arange(math.prod(self.kept)))
        return (flat.T if self.first else flat).reshape(self.sizes).astype(self.dtype)

    def rows(self, ids: Int[Array, "..."]) -> Shaped[Array, "... D"]:
        """Rows along the first axis of a weight [V, D] that is summed over D: the lookup of an embedding."""
        if self.first or len(self.sizes) != 2:
            return self.dense()[ids]
        return self._columns(jnp.clip(ids, 0, self.sizes[0] - 1)).astype(self.dtype)

    def _by_expert(self) -> "Panels":
        """The weight of one expert, whose arrays have those of all on a leading axis."""
        arrays = jax.tree.map(lambda a: a.reshape(self.experts, -1, *a.shape[1:]), self)
        return replace(arrays, shape=self.shape[1:], unpacked=self.sizes[1:], experts=0)

    def _columns(self, ids: Int[Array, "..."]) -> Shaped[Array, "... summed"]:
        """Some columns."""
        panel, column = ids // PANEL, ids % PANEL
        if self.scale is None:
            return self.values[panel, :, column]
        blocks = self.scale.shape[1]
        block = self.summed // blocks

        def spread(a: Array) -> Array:
            return jnp.repeat(a[panel, :, column], block, -1)

        w = self.code.decoded(some_codes(self.values, panel, column, blocks, block, self.code.bits)) * spread(self.scale)
        return w if self.minimum is None else w - spread(self.minimum)


def block_counts(sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    """How many blocks each of some neighboring axes has so that a block is contiguous when they are read as one, the last fastest:
    each of them within one of the blocks that are given.

    Args:
        counts: the blocks of each axis.
    """
    out, whole = list(sizes), True
    for axis in reversed(range(len(sizes))):
        if not whole:
            break
        out[axis], whole = counts[axis], counts[axis] == 1
    return out


def pack_panels(w: Any, inner: int, first: bool) -> Panels:
    """A weight in panels, on the same device.

    Args:
        w: float32 or bfloat16, in the memory of one CPU device.
        inner, first: as in `Panels`.
    """
    host = np.asarray(w)
    summed = math.prod(host.shape[:inner] if first else host.shape[len(host.shape) - inner :])
    flat = host.reshape(summed, -1) if first else host.reshape(-1, summed)
    if host.dtype == np.float32 and fits_bfloat16(flat):
        flat = (flat.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    columns = flat.shape[1] if first else flat.shape[0]
    full, rest = divmod(columns, PANEL)
    values = np.zeros((full + bool(rest), summed, PANEL), flat.dtype)
    for i in range(len(values)):
        part = slice(i * PANEL, min((i + 1) * PANEL, columns))
        values[i, :, : part.stop - part.start] = flat[:, part] if first else flat[part].T
    # Programs compile anew for arrays that are tied to a device, if these were not.
    place = w.sharding if isinstance(w, jax.Array) and w.committed else None
    return Panels(jax.device_put(values, place, may_alias=True), host.shape, inner, first, host.dtype)


def fits_bfloat16(w: np.ndarray) -> bool:
    """Whether every number of a float32 array is a bfloat16, bit for bit."""
    bits = w.reshape(-1).view(np.uint32)
    # Most weights differ at once.
    if (bits[:1024] & 0xFFFF).any():
        return False
    return not any((part & 0xFFFF).any() for part in np.array_split(bits, max(1, bits.size >> 20)))


def product(x: Float[Array, "M K"], w: Panels, sizes: Int[Array, "E"] | None = None) -> Float[Array, "M N"]:
    """x times a packed weight, summed in float32 in the order of the summed axis; a row's result does not depend on other rows.

    Args:
        sizes: of experts, the rows of each: those of the first come first. Rows after the last give zeros.

    Raises:
        Unsupported: a gradient is asked for.
    """
    return _product(x, w, _rows(sizes))


def integer_product(
    x: Float[Array, "M K"],
    w: Panels,
    bits: int,
    scales: int = 1,
    scale: Float[Array, "..."] | None = None,
    sizes: Int[Array, "E"] | None = None,
) -> Float[Array, "M N"]:
    """Data, rounded to whole numbers of at most eight bits, times a packed weight of whole numbers. Within a block sums are exact.

    Args:
        bits: of the numbers that data is rounded to, as `adapt.formats` does.
        scales: how many scales a row of data has, each from the largest magnitude (`multiplies_integers`).
        scale: one for all data, in their place.
        sizes: as in `product`.

    Raises:
        Unsupported: a gradient is asked for.
    """
    static_scale = jnp.zeros(0, jnp.float32) if scale is None else scale.astype(jnp.float32).reshape(1)
    return _integer_product(x, w, static_scale, _rows(sizes), bits, scales)


def multiplies_integers(w: Panels, scales: int) -> bool:
    """Whether data with so many scales a row is multiplied as whole numbers."""
    if w.scale is None or w.code.numbers != "whole":
        return False
    blocks = w.scale.shape[1]
    return blocks % scales == 0 and w.summed // blocks <= LONGEST


def _rows(sizes: Array | None) -> Array:
    return jnp.zeros(0, jnp.int32) if sizes is None else sizes.astype(jnp.int32)


@jax.custom_vjp
def _product(x: Array, w: Panels, sizes: Array) -> Array:
    out = jax.ShapeDtypeStruct((x.shape[0], math.prod(w.kept)), jnp.float32)
    x = x.astype(jnp.float32)
    if w.scale is None:
        return jax.ffi.ffi_call("argosy_product", out)(x, w.values)
    code, levels = w.code, jnp.asarray(np.asarray(w.code.levels, np.float32))
    attributes = {"bits": np.int64(code.bits), "zero": np.int64(code.zero), "numbers": np.int64(NUMBERS.index(code.numbers))}
    return jax.ffi.ffi_call("argosy_blocks_product", out)(x, w.values, w.scale, _minimum(w), levels, sizes, **attributes)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _integer_product(x: Array, w: Panels, scale: Array, sizes: Array, bits: int, scales: int) -> Array:
    out = jax.ShapeDtypeStruct((x.shape[0], math.prod(w.kept)), jnp.float32)
    attributes = {"bits": w.code.bits, "zero": w.code.zero, "scales": scales, "x_bits": bits}
    call = jax.ffi.ffi_call("argosy_integer_product", out)
    return call(x, scale, w.values, w.scale, _minimum(w), sizes, **{name: np.int64(value) for name, value in attributes.items()})


def _minimum(w: Panels) -> Array:
    return jnp.zeros(0, jnp.float32) if w.minimum is None else w.minimum


def _forward(*_: Any) -> Any:
    raise Unsupported("packed weights answer alone, and have no gradient", hint="load the model without blocks=True")


_product.defvjp(_forward, _forward)
_integer_product.defvjp(_forward, _forward)
