"""The module of a ranker (`models.ranker` has the equations)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.dense import DenseLayers
from argosy.models.parts.einsum import Einsum


class Ranker(nnx.Module):
    """Maps numbers and categories to a logit."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        self.embed = Einsum("BFV,VD->BFD", config.dims, scale=config.width**-0.5)
        self.bottom, self.top = (DenseLayers(config.widths[name]) for name in ("bottom", "top"))

    def __call__(self, numbers: Float[Array, "B I"], categories: Int[Array, "B F"]) -> Float[Array, "B"]:
        first = self.bottom(numbers.astype(self.dtype))
        rows = self.embed.take(categories + np.asarray(self.config.offsets, np.int32)).astype(self.dtype)
        vectors = jnp.concatenate([first[:, None], rows], 1)
        products = jnp.einsum("BFD,BGD->BFG", vectors, vectors)
        below = np.tril_indices(vectors.shape[1], -1)
        return self.top(jnp.concatenate([first, products[:, below[0], below[1]]], 1))[:, 0].astype(jnp.float32)
