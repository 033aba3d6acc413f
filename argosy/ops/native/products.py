"""Weights packed for small products on a CPU, and their product with data.

XLA:CPU multiplies 8 rows with a weight at 54 GFLOP/s on the machine of docs/log, this at 110; a single row at the speed of memory
in both. Columns are kept in panels of 32, in which the summed axis is the slow one, so a product reads a weight front to back once,
whatever the number of rows. Weights that bfloat16 holds exactly (a published bfloat16 file) are kept in it: half the memory and, for
few rows, half the time, with the same result. Blocks of few bits (`ops.native.blocks`) are kept as they are, with the same result too.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from argosy.core.errors import Unsupported

# Columns of a panel; `PANEL` in kernels.cc.
PANEL = 32
# Smaller weights stay as they are: a call costs as much as their product.
SMALLEST = 1 << 14


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A weight, packed.

    values: [panels, summed, PANEL] float32, bfloat16 or int8; zeros fill up the last panel. With scales they are codes in uint8, with
        the highest bit flipped (`blocks.cc`), and [panels, summed, PANEL / 2] has two of four bits in a byte, columns c and c + 16.
    shape: of the weight. inner: how many of its axes are summed; first: whether these come first.
    scale, minimum: [panels, blocks, PANEL] float32 of blocks along the summed axis: w = scale * (code - zero) - minimum.
    """

    values: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    inner: int = field(metadata={"static": True})
    first: bool = field(metadata={"static": True})
    # Of the weight as it was given.
    dtype: Any = field(metadata={"static": True})
    scale: Any = None
    minimum: Any = None
    zero: int = field(default=0, metadata={"static": True})

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
    def kept(self) -> tuple[int, ...]:
        """The sizes of the axes that a product keeps."""
        return self.shape[self.inner :] if self.first else self.shape[: len(self.shape) - self.inner]

    def dense(self) -> Array:
        """The weight."""
        panels, summed, _ = self.values.shape
        flat = self._floats(slice(None), slice(None)).transpose(1, 0, 2).reshape(summed, panels * PANEL)[:, : math.prod(self.kept)]
        return (flat if self.first else flat.T).reshape(self.shape).astype(self.dtype)

    def rows(self, ids: Int[Array, "..."]) -> Shaped[Array, "... D"]:
        """Rows along the first axis of a weight [V, D] that is summed over D: the lookup of an embedding."""
        if self.first or len(self.shape) != 2:
            return self.dense()[ids]
        ids = jnp.clip(ids, 0, self.shape[0] - 1)
        return self._floats(ids // PANEL, ids % PANEL).astype(self.dtype)

    def _floats(self, panel: Any, column: Any) -> Array:
        """Some columns of some panels, [... summed], or [panels summed PANEL] of all."""
        if self.scale is None:
            return self.values[panel, :, column]
        found = codes(self.values)[panel, :, column] if isinstance(panel, slice) else _some_codes(self.values, panel, column)
        axis = 1 if isinstance(panel, slice) else found.ndim - 1
        block = self.values.shape[1] // self.scale.shape[1]

        def spread(a: Array) -> Array:
            return jnp.repeat(a[panel, :, column], block, axis)

        w = spread(self.scale) * (found.astype(jnp.float32) - self.zero)
        return w if self.minimum is None else w - spread(self.minimum)


def codes(values: Array) -> Array:
    """The codes of a weight in blocks, [panels, summed, PANEL]."""
    if values.shape[2] == PANEL:
        return values ^ 128
    return jnp.concatenate([values & 15, values >> 4], 2)


def _some_codes(values: Array, panel: Array, column: Array) -> Array:
    """The codes of one column of each of these panels, [... summed]."""
    if values.shape[2] == PANEL:
        return values[panel, :, column] ^ 128
    both = values[panel, :, column % (PANEL // 2)]
    return jnp.where((column < PANEL // 2)[..., None], both & 15, both >> 4)


def packed(w: Any, inner: int, first: bool) -> Panels:
    """A weight in panels, on the same device.

    Args:
        w: float32, bfloat16 or int8, in the memory of one CPU device.
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


def product(x: Float[Array, "M K"], w: Panels) -> Float[Array, "M N"]:
    """x times a packed weight, summed in float32 in the order of the summed axis; a row's result does not depend on other rows.

    Raises:
        Unsupported: a gradient is asked for.
    """
    return _product(x, w)


@jax.custom_vjp
def _product(x: Array, w: Panels) -> Array:
    out = jax.ShapeDtypeStruct((x.shape[0], math.prod(w.kept)), jnp.float32)
    x = x.astype(jnp.float32)
    if w.scale is None:
        return jax.ffi.ffi_call("argosy_product", out)(x, w.values)
    minimum = jnp.zeros(0, jnp.float32) if w.minimum is None else w.minimum
    return jax.ffi.ffi_call("argosy_blocks_product", out)(x, w.values, w.scale, minimum, zero=np.int64(w.zero))


def _forward(*_: Any) -> Any:
    raise Unsupported("packed weights answer alone, and have no gradient", hint="load the model without blocks=True")


_product.defvjp(_forward, _forward)
