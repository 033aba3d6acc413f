"""The grouped matrix product by library kernels: megablox (Pallas for TPUs, part of JAX) and Tokamax (a separate package).

Both are imported on first use.
"""

import importlib.util

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.grouped import cleared
from argosy.ops.op import Implementation
from argosy.parallel.scope import platform

# The kernel needs a multiple of this, so rows are padded.
TILE_ROWS = 512
# The most of D and M: a tile of bfloat16 weights takes 2 MB of the TPU's fast memory, twice.
TILE_SIDES = 1024
# Tiles are whole registers of this width.
LANES = 128


def _megablox(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    rows = x.shape[0]
    tile = min(TILE_ROWS, -(-rows // LANES) * LANES)
    padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    return gmm(padded, w, sizes, x.dtype, (tile, *(min(TILE_SIDES, side) for side in w.shape[1:])))[:rows]


def _tokamax(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    # Otherwise Tokamax would parse the words of this program's command line.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["tokamax"])
    return tokamax.ragged_dot(x, w, sizes)


def _megablox_refuses(x: Array, w: Array) -> str | None:
    if platform() != "tpu":
        return f"a kernel for TPUs; this program is for {platform()}"
    if w.shape[1] % LANES or w.shape[2] % LANES:
        return f"a weight of {w.shape[1]} x {w.shape[2]}, but both sizes must be multiples of {LANES}"
    return None


def _tokamax_refuses(x: Array, w: Array) -> str | None:
    return None if importlib.util.find_spec("tokamax") else "the package tokamax is not installed"


MEGABLOX = Implementation(cleared(_megablox), _megablox_refuses)
TOKAMAX = Implementation(cleared(_tokamax), _tokamax_refuses)
