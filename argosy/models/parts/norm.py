"""Normalisation, always computed in float32: a mean of squares in bfloat16 keeps two digits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.weight import Draw, Meaning, weight


class RMSNorm(nnx.Module):
    """x / rms(x) * (scale + offset). Zhang and Sennrich 2019 (arXiv:1910.07467).

    `offset` 1 means that scale-1 is stored (Gemma, Qwen3-Next); it then starts at 0.
    """

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0, letter: str = "D"):
        self.eps, self.offset = eps, offset
        self.scale = weight((width,), Meaning(letter), Draw("constant", 1.0 - offset))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * (self.scale[...].astype(jnp.float32) + self.offset)).astype(x.dtype)
