"""Rotary positions, with their scaling as data. Su et al. 2021 (arXiv:2104.09864).

Frequencies are NumPy constants of the traced program. Angles are float32: bfloat16 rounds position 257 to 256.
"""


import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.models.settings import Rope


def apply_rope(x: Float[Array, "B T N H"], at: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T N H"]:
    """Turns each pair of features by its position."""
    size = rope.turned(x.shape[-1])
    freq, factor = rope.frequencies(size)
    angle = at.astype(jnp.float32)[:, :, None, None] * jnp.asarray(freq, jnp.float32)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    y = x[..., :size].astype(jnp.float32)
    if rope.pairs == "interleaved":
        a, b = y[..., 0::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)
    else:
        a, b = jnp.split(y, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], -1)
