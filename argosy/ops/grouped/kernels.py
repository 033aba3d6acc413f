"""The grouped matrix product by library kernels: megablox (Pallas for TPUs, part of JAX) and Tokamax (a separate package).

Both are imported on first use. Megablox has a kernel for the gradient of the weights. XLA (libtpu 0.0.42) multiplies all rows for every
expert there, which is 16 times the work if a device has 16 experts.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.ops.grouped import clear_unowned_rows
from argosy.ops.op import Implementation
from argosy.parallel.scope import platform

# The number of rows of a tile. The kernel needs a multiple of it, so rows are padded.
TILE_ROWS = 512
# The largest tile along D and M: a tile of bfloat16 weights takes 2 MB of the TPU's fast memory, twice.
TILE_SIDES = 1024
# The sides of tiles are multiples of the width of a register.
LANES = 128


@jax.custom_vjp
def _megablox(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    return _rows_times(x, w, sizes, transposed=False)


def _forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rows_times(x, w, sizes, transposed=False), (x, w, sizes)


def _backward(residuals: tuple[Array, Array, Array], g: Float[Array, "X M"]) -> tuple[Any, ...]:
    x, w, sizes = residuals
    return _rows_times(g, w, sizes, transposed=True), _outer(x, g, sizes), np.zeros(sizes.shape, jax.dtypes.float0)


_megablox.defvjp(_forward, _backward)


def _rows_times(x: Float[Array, "X K"], w: Float[Array, "E ..."], sizes: Array, *, transposed: bool) -> Array:
    """Multiplies each row with the weight of its expert, or with the weight's transpose."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    padded, tile = _padded(x)
    sides = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
    # The library does not work with strict dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
        y = gmm(padded, w, sizes, x.dtype, (tile, *map(_tile, sides)), transpose_rhs=transposed, interpret=platform() != "tpu")
    return y[: len(x)]


def _outer(x: Float[Array, "X D"], g: Float[Array, "X M"], sizes: Array) -> Float[Array, "E D M"]:
    """Computes the gradient of the weights: x' g over the rows of each expert."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (rows, tile), (of_g, _) = _padded(x), _padded(g)
    tiles = tile, _tile(x.shape[1]), _tile(g.shape[1])
    with jax.numpy_dtype_promotion("standard"):
        return tgmm(rows.T, of_g, sizes, x.dtype, tiles, interpret=platform() != "tpu")


def _padded(x: Float[Array, "X K"]) -> tuple[Float[Array, "_ K"], int]:
    """Pads the rows of x to whole tiles. Also returns the number of rows of a tile."""
    tile = min(TILE_ROWS, -(-len(x) // LANES) * LANES)
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0))), tile


def _tile(side: int) -> int:
    return min(TILE_SIDES, side)


def _tokamax(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    # Otherwise Tokamax would parse the command line of this program.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["tokamax"])
    return tokamax.ragged_dot(x, w, sizes)


def _megablox_refuses(x: Array, w: Array) -> str | None:
    if platform() != "tpu":
        return f"a kernel for TPUs; this program is for {platform()}"
    if any(side % LANES and side < TILE_SIDES for side in w.shape[1:]):
        return f"a weight of {w.shape[1]} x {w.shape[2]}, but sizes below {TILE_SIDES} must be multiples of {LANES}"
    return None if isinstance(x.shape[0], int) else "the number of rows is not known"


def _tokamax_refuses(x: Array, w: Array) -> str | None:
    return None if importlib.util.find_spec("tokamax") else "the package tokamax is not installed"


MEGABLOX = Implementation(clear_unowned_rows(_megablox), _megablox_refuses)
TOKAMAX = Implementation(clear_unowned_rows(_tokamax), _tokamax_refuses)
