"""Functions for layers that read a time step: sinusoidal embeddings, and norms that are shifted and scaled by a condition (adaLN).

    modulate(x, shift, scale) = norm(x) (1 + scale) + shift        norm: LayerNorm without weights

Perez et al. 2018 (FiLM, arXiv:1709.07871); Peebles and Xie 2023 (arXiv:2212.09748).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.ops.precision import wide


def sinusoid(timestep: Float[Array, "B"], size: int, *, shift: float = 0.0, period: float = 1e4) -> Float[Array, "B W"]:
    """Computes the sinusoidal embedding of a time step: size / 2 cosines, then as many sines (diffusers' `flip_sin_to_cos`).

    Args:
        size: the number of features W.
        shift: diffusers' `downscale_freq_shift`, which is 0 in Flux, Stable Diffusion and Wan and 1 in diffusers' DiT.
        period: the longest wavelength is about 2 pi times this.
    """
    half = size // 2
    # Exponents are float32, as in diffusers. At time step 1000, a frequency with other rounding would change an angle by 6e-4.
    exponents = np.float32(-np.log(period)) * np.arange(half, dtype=np.float32) / np.float32(half - shift)
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angle = timestep[:, None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)


def layer_norm(x: Float[Array, "B T D"], eps: float = 1e-6) -> Float[Array, "B T D"]:
    """Applies LayerNorm without weights."""
    y = wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype)


def modulate(
    x: Float[Array, "B T D"], shift: Float[Array, "B D"], scale: Float[Array, "B D"], eps: float = 1e-6
) -> Float[Array, "B T D"]:
    """Normalizes x with `layer_norm`, then scales by 1 + scale and shifts by shift, the same at all positions."""
    return layer_norm(x, eps) * (1 + scale[:, None]) + shift[:, None]
