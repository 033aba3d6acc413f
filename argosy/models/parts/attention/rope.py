"""Rotary position embeddings (RoPE). Su et al. 2021 (arXiv:2104.09864). `models.settings.Rope` holds the settings, with scaling.

Frequencies are NumPy constants of the traced program. Angles are float32, or float64 if JAX has it enabled, because bfloat16 rounds
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
    """Computes the cosines and sines of the rotary angles of each position.

    A stack computes them once for all its layers. XLA:CPU still fuses the cosine into each place that reads it, with or without an
    optimization barrier. A loop over rows prevents that and is no faster (docs/log).

    Args:
        at: positions. If positions have several axes, each section of the feature pairs (`Rope.sections`) is rotated by one of them.
        size: the number of rotated features. The result has size / 2 pairs.
    """
    freq, factor = rope.frequencies(size)
    if at.ndim == 3:
        at = jnp.repeat(at, np.asarray(rope.sections_for(size, at.shape[2])), axis=2, total_repeat_length=size // 2)
        angle = at.astype(float)[:, :, None] * jnp.asarray(freq, float)
    else:
        angle = at.astype(float)[:, :, None, None] * jnp.asarray(freq, float)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x: Float[Array, "B T N H"], rope: Rope, table: Angles) -> Float[Array, "B T N H"]:
    """Rotates each pair of features by the angles of `table`. Features beyond `Rope.rotated_size` are unchanged."""
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
    """Rotates each pair of neighboring features, in the dtype of the cosines.

    An array of pairs has a last axis of 2, which fills a 64th of a TPU's tiles. On TPUs, a product with a signed permutation matrix
    therefore swaps neighboring features, exactly. This makes a step of Flux.1 7 to 12 % faster (docs/measured.md).
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
