"""Weights that are packed in panels for products with few rows on a CPU, and these products.

With 8 rows, XLA:CPU reaches 54 GFLOP/s on the machine of docs/log, and this module 110. With one row, both are limited by memory. A
panel has 32 columns, and its slow axis is the summed one, so that a product reads the weight once, front to back, whatever the number
of rows. Weights whose numbers are all exact in bfloat16 (published as bfloat16) are stored as bfloat16: half the memory and, for few
rows, half the time, with the same result. Weights of few bits (`ops.native.blocks`) are stored as codes.
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

# Smaller weights are not packed, because the call would take as long as the product.
SMALLEST = 1 << 14
# The longest block whose sum of 8-bit products, each at most 255 * 128, fits in 32 bits.
LONGEST = 1 << 15


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A weight in panels.

    values: [panels, summed, PANEL], float32 or bfloat16, with zeros as padding in the last panel. If there are scales, uint8 codes in
        the layout of `ops.native.codes`.
    shape: the shape of the array that the panels replace.
    inner: the number of the weight's axes that are summed.
    first: whether the summed axes come first.
    dtype: the dtype of the array that the panels replace.
    scale, minimum: [panels, blocks, PANEL] float32, for each block along the summed axis: w = scale * number - minimum.
    code: the numbers that codes stand for.
    activations: how the data of a product is rounded (`adapt.formats.activations`). None: it is not rounded, or the `Quantized` that
        holds these panels says how.
    unpacked: the shape of the weight. It differs from `shape` if several codes shared an element of the array. None: `shape`.
    experts: the number of matrices along the first axis, whose panels are concatenated. `inner` and `first` are then about the axes of
        one matrix. 0: the weight is one matrix.
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
        """Returns itself, for `weight[...]`. Other indexes are refused."""
        if index is not Ellipsis:
            raise TypeError("a packed weight has no slices")
        return self

    @property
    def sharding(self) -> Any:
        """The sharding of the panels."""
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
        """The sizes of the axes that are not summed, for one expert if there are experts."""
        sizes = self.sizes[1:] if self.experts else self.sizes
        return sizes[self.inner :] if self.first else sizes[: len(sizes) - self.inner]

    @property
    def summed(self) -> int:
        """The number of rows of the weight as a matrix, which a product sums over."""
        return math.prod(self.sizes) // math.prod(self.kept) // max(self.experts, 1)

    def dense(self) -> Array:
        """Unpacks the weight, and dequantizes it."""
        if self.experts:
            return jax.vmap(Panels.dense)(self._by_expert())
        if self.scale is None:
            panels, summed, _ = self.values.shape
            flat = self.values.transpose(0, 2, 1).reshape(panels * PANEL, summed)[: math.prod(self.kept)]
        else:
            flat = self._columns(jnp.arange(math.prod(self.kept)))
        return (flat.T if self.first else flat).reshape(self.sizes).astype(self.dtype)

    def rows(self, ids: Int[Array, "..."]) -> Shaped[Array, "... D"]:
        """Looks up rows along the first axis of a weight [V, D], as an embedding does."""
        if self.first or len(self.sizes) != 2:
            return self.dense()[ids]
        return self._columns(jnp.clip(ids, 0, self.sizes[0] - 1)).astype(self.dtype)

    def _by_expert(self) -> "Panels":
        """Returns the weights with a leading axis of experts on all arrays, to be mapped over with `vmap`."""
        arrays = jax.tree.map(lambda a: a.reshape(self.experts, -1, *a.shape[1:]), self)
        return replace(arrays, shape=self.shape[1:], unpacked=self.sizes[1:], experts=0)

    def _columns(self, ids: Int[Array, "..."]) -> Shaped[Array, "... summed"]:
        """Unpacks and dequantizes some columns."""
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
    """Refines blocks so that each is contiguous when neighboring axes are merged into one, with the last axis fastest.

    Args:
        sizes: the sizes of the axes.
        counts: the number of blocks along each axis.

    Returns:
        The new number of blocks along each axis. Each new block lies within one of the given blocks.
    """
    out, whole = list(sizes), True
    for axis in reversed(range(len(sizes))):
        if not whole:
            break
        out[axis], whole = counts[axis], counts[axis] == 1
    return out


def pack_panels(w: Any, inner: int, first: bool) -> Panels:
    """Packs a weight, on the same device.

    Args:
        w: a float32 or bfloat16 array in the memory of one CPU device.
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
    # Committed to a device only if w is. Otherwise programs would be compiled again for the committed array.
    place = w.sharding if isinstance(w, jax.Array) and w.committed else None
    return Panels(jax.device_put(values, place, may_alias=True), host.shape, inner, first, host.dtype)


def fits_bfloat16(w: np.ndarray) -> bool:
    """Whether every number of a float32 array is a bfloat16, bit for bit."""
    bits = w.reshape(-1).view(np.uint32)
    # Most weights that do not fit are recognized by their first numbers.
    if (bits[:1024] & 0xFFFF).any():
        return False
    return not any((part & 0xFFFF).any() for part in np.array_split(bits, max(1, bits.size >> 20)))


def product(x: Float[Array, "M K"], w: Panels, sizes: Int[Array, "E"] | None = None) -> Float[Array, "M N"]:
    """Multiplies x with a packed weight. Sums in float32, in the order of the summed axis, whatever the other rows.

    Args:
        sizes: for experts, the number of rows of each. Rows are sorted by expert. Rows after those of the last expert give zeros.

    Raises:
        Unsupported: the product is differentiated.
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
    """Rounds x to integers of at most eight bits, and multiplies with a packed weight of integers. Sums within a block are exact.

    Args:
        bits: the number of bits that x is rounded to, as in `adapt.formats`.
        scales: the number of scales of each row of x, each from the largest magnitude of its part (`multiplies_integers`).
        scale: one scale for all of x, instead of those from magnitudes. None: scales from magnitudes.
        sizes: as in `product`.

    Raises:
        Unsupported: the product is differentiated.
    """
    static_scale = jnp.zeros(0, jnp.float32) if scale is None else scale.astype(jnp.float32).reshape(1)
    return _integer_product(x, w, static_scale, _rows(sizes), bits, scales)


def multiplies_integers(w: Panels, scales: int) -> bool:
    """Whether `integer_product` can multiply this weight with data that has `scales` scales per row."""
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
