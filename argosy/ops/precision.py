"""The dtype for sums: float64 for float64 numbers, and float32 for all others."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Num


def sums_in(dtype: Any) -> Any:
    """Returns the dtype for sums over numbers of this dtype: float64 for float64, float32 for every other."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def wide(x: Num[Array, "*any"]) -> Num[Array, "*any"]:
    """Converts x to the dtype for sums (`sums_in`)."""
    return x.astype(sums_in(x.dtype))
