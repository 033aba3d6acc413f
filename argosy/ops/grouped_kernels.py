"""The grouped matrix product by library kernels: megablox (Pallas for TPUs, part of JAX) and Tokamax (a package of its own).

Both are imported when they are first used.
"""

import importlib.util

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.grouped import Implementation, cleared, platform

TILE_ROWS = 512  # the kernel wants a multiple, so rows are added
TILE_SIDES = 1024  # of D and M at most: a tile of bfloat16 weights takes 2 MB of the TPU's fast memory, twice over
LANES = 128  # tiles are whole registers of this width


def _megablox(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    rows = x.shape[0]
    tile = min(TILE_ROWS, -(-rows // LANES) * LANES)
    padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    return gmm(padded, w, sizes, x.dtype, (tile, *(min(TILE_SIDES, side) for side in w.shape[1:])))[:rows]


def _tokamax(x: Float[Array, "X D"], w: Float[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():  # else Tokamax takes the words of this program's command line for its own
        flags.FLAGS(["tokamax"])
    return tokamax.ragged_dot(x, w, sizes)


def _megablox_refuses(x: Array, w: Array) -> str | None:
    if platform() != "tpu":
        return f"a kernel for TPUs; this program is for {platform()}"
    if w.shape[1] % LANES or w.shape[2] % LANES:
        return f"a weight of {w.shape[1]} x {w.shape[2]}; both must be multiples of {LANES}"
    return None


def _tokamax_refuses(x: Array, w: Array) -> str | None:
    return None if importlib.util.find_spec("tokamax") else "the package tokamax is not installed"


MEGABLOX = Implementation(cleared(_megablox), _megablox_refuses)
TOKAMAX = Implementation(cleared(_tokamax), _tokamax_refuses)
