"""The type that sums are kept in: float32 at least, and float64 for numbers that are float64."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Num


def sums_in(dtype: Any) -> Any:
    """The type for sums over numbers of this type: float64 for float64, float32 for every other."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def wide(x: Num[Array, "*any"]) -> Num[Array, "*any"]:
    """These numbers in the type that sums over them are kept in."""
    return x.astype(sums_in(x.dtype))
