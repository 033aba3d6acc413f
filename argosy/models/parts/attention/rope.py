"""Rotary positions, with their scaling as data. Su et al. 2021 (arXiv:2104.09864).

Frequencies are NumPy constants of the traced program. Angles are float32, or float64 where JAX has it enabled: bfloat16 rounds
position 257 to 256.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from argosy.models.settings import Rope
from argosy.ops.precision import wide
from argosy.parallel.scope import platform

# The rotary positions of a layer, and how many features of a head they apply to.
Turns = tuple[tuple[Rope, int], ...]
Angles = tuple[Float[Array, "B T 1 pairs"], Float[Array, "B T 1 pairs"]]


def angles(at: Int[Array, "B T"] | Int[Array, "B T A"], rope: Rope, size: int) -> Angles:
    """Cosine and sine of each position, for this number of rotated features. Positions with several axes turn each section of the pairs
    (`Rope.sections`) by its axis; positions with one turn all.

    A stack computes them once for all its layers. XLA:CPU still fuses the cosine into each place that reads it, with or without an
    optimization barrier; a loop over rows stops that and is no faster (docs/log).
    """
    freq, factor = rope.frequencies(size)
    if at.ndim == 3:
        at = jnp.repeat(at, np.asarray(rope.sections_for(size, at.shape[2])), axis=2, total_repeat_length=size // 2)
        angle = at.astype(float)[:, :, None] * jnp.asarray(freq, float)
    else:
        angle = at.astype(float)[:, :, None, None] * jnp.asarray(freq, float)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x: Float[Array, "B T N H"], rope: Rope, table: Angles) -> Float[Array, "B T N H"]:
    """Rotates each pair of features by its position."""
    size, (cos, sin) = rope.rotated_size(x.shape[-1]), table
    y = wide(x[..., :size])
    cos, sin = cos.astype(y.dtype), sin.astype(y.dtype)
    if rope.pairs == "interleaved":
        turned = turn_neighbors(x[..., :size], cos, sin)
    else:
        a, b = jnp.split(y, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], -1)


def turn_neighbors(x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 pairs"], sin: Float[Array, "B T 1 pairs"]) -> Array:
    """Turns each pair of neighboring features, in the type of the cosines.

    An array of pairs has a last axis of 2, of whose tiles TPUs use a 64th. There, a product with a matrix of zeros and ones puts each
    feature in the place of its neighbor, exactly: Flux.1's step takes 7 to 12 % less (docs/measured.md).
    """
    y = x.astype(cos.dtype)
    if platform() != "tpu":
        a, b = y[..., 0::2], y[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)
    size = x.shape[-1]
    swap = np.kron(np.eye(size // 2), np.array([[0, 1], [-1, 0]]))
    exact: Any = {"precision": lax.Precision.HIGHEST, "preferred_element_type": y.dtype}
    neighbor = jnp.einsum("...h,hk->...k", x, jnp.asarray(swap, x.dtype), **exact)
    return y * jnp.repeat(cos, 2, -1) + neighbor * jnp.repeat(sin, 2, -1)
