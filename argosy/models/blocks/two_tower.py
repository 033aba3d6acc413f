"""The module of two towers (`models.two_tower` has the equations)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.dense import DenseLayers
from argosy.models.parts.einsum import Einsum


class TwoTower(nnx.Module):
    """Maps users and items to unit vectors."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        self.embed = Einsum("BV,VD->BD", config.dims, scale=config.width**-0.5)
        self.user, self.item = (DenseLayers(config.widths[name]) for name in ("user", "item"))

    def users(self, numbers: Float[Array, "B I"], users: Int[Array, "B"]) -> Float[Array, "B O"]:
        """Computes the vectors of users, from their numbers and ids."""
        row = self.embed.take(users).astype(self.dtype)
        return unit_length(self.user(jnp.concatenate([row, numbers.astype(self.dtype)], 1)))

    def items(self, items: Int[Array, "B"]) -> Float[Array, "B O"]:
        """Computes the vectors of items, from their ids."""
        return unit_length(self.item(self.embed.take(items + self.config.users).astype(self.dtype)))

    def __call__(self, numbers: Float[Array, "B I"], categories: Int[Array, "B F"]) -> Float[Array, "B"]:
        """Computes the score of each pair of a user and an item. Categories 0 and 1 are the ids of user and item."""
        both = self.users(numbers, categories[:, 0]) * self.items(categories[:, 1])
        return jnp.sum(both, -1).astype(jnp.float32) / self.config.temperature


def unit_length(x: Float[Array, "B O"]) -> Float[Array, "B O"]:
    """Scales vectors to length 1."""
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12)
