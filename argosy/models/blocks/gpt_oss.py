"""The activation of gpt-oss's experts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def clipped_swiglu(gate: Array, up: Array, limit: float, alpha: float) -> Array:
    """Computes gpt-oss's SwiGLU. The gate is clipped from above only, `up` from both sides."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
