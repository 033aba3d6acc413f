"""A text encoder around its layers: embeddings, layers, pooler and head, from tokens to vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Aux, Execution, Layer, Stack
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


class TextEncoder(nnx.Module):
    """Maps each token to a vector. The attribute `dtype` is the type of activations and so of contractions.

    Args:
        config: the family's config. Its fields dims and scored are read.
        plan, make, run: as in `Stack`.
        norm: the norm of the sum of the three embeddings (token, position, token type).
        first: the row of the position embedding that belongs to the first token.
        pooler: whether the model has a pooler, a projection of the first token's vector (`pooled`).
    """

    def __init__(
        self,
        config: Any,
        plan: Sequence[Layer],
        make: Callable[[str], Any],
        norm: nnx.Module,
        run: Execution | None,
        *,
        first: int = 0,
        pooler: bool = False,
    ):
        self.config, self.dtype, self.first = config, jnp.float32, first
        self.embed = Einsum("BTV,VD->BTD", config.dims, scale=0.02)
        self.positions = Einsum("BTA,AD->BTD", config.dims, scale=0.02)
        self.types = Einsum("BTY,YD->BTD", config.dims, scale=0.02)
        self.embed_norm = norm
        self.layers = Stack(plan, make, run=run)
        self.pooler = Einsum("BD,DO->BO", config.dims, bias=True) if pooler else None
        # The same standard deviation as for new heads in transformers, so that initial scores are near 0.
        self.head = Einsum("BO,OZ->BZ", config.dims, bias=True, scale=0.02) if config.scored else None

    def embedded(
        self, tokens: Int[Array, "B T"], attend: Attend, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Computes the input of the first layer. Arguments as in `hidden`."""
        x = self.embed.take(tokens) + self.positions.take(attend.positions + self.first)
        x = x + self.types.take(jnp.zeros_like(tokens) if types is None else types)
        return self.embed_norm(x.astype(self.dtype))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        attend: Attend,
        cache: Any = None,
        types: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Computes a vector for each token. Also returns the cache, unchanged, and the aux outputs of the layers.

        Args:
            types: the token types, 0 for the first text of a pair and 1 for the second. Default: all 0.
        """
        x, cache, aux = self.layers(self.embedded(tokens, attend, types), cache, attend)
        return constrain(x, "B T D"), cache, aux

    def pooled(self, x: Float[Array, "B T D"]) -> Float[Array, "B O"]:
        """Computes the pooler's vector for each sequence: tanh of a projection of the first token's vector.

        Raises:
            ValueError: this model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this model has no pooler")
        return jnp.tanh(self.pooler(x[:, 0]))

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Z"]:
        """Computes scores from the vectors of first tokens, in float32 at least.

        Raises:
            ValueError: this model has no head of scores.
        """
        if self.head is None or self.pooler is None:
            raise ValueError("this model has no head of scores")
        flat = jnp.tanh(self.pooler(x.reshape(-1, x.shape[-1])))
        return self.head(flat, dtype=sums_in(x.dtype)).reshape(*x.shape[:-1], -1)

    def __call__(
        self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        return self.hidden(tokens, attend, cache)
