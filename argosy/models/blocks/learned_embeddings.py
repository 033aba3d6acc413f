"""The module of learned embeddings (`models.diffusion.learned_embeddings` has the equations)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.inputs import Inputs, Overlay
from argosy.models.parts.weight import Draw, Meaning, weight

# The deviation of CLIP's own rows. Training begins with the row of a word instead.
SCALE = 0.02
LEGEND = (("J", "learned_tokens"),)


class LearnedEmbeddings(nnx.Module):
    """Prompts with a learned token to what a text encoder reads."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        for name, width in zip(config.encoders, config.widths, strict=True):
            setattr(self, name, weight((config.vectors, width), Meaning("JD", legend=LEGEND), Draw("normal", SCALE)))

    def rows(self, encoder: str) -> Float[Array, "J D"]:
        """The rows of the token for a text encoder."""
        return getattr(self, encoder)[...]

    def inputs(self, encoder: str, ids: Int[Array, "B T"], vocab: int) -> Inputs:
        """What a text encoder reads.

        Args:
            ids: of prompts; row i of the token is vocab + i, where `vocab` is the encoder's own.
        """
        place = jnp.maximum(ids - vocab, 0)
        return Inputs(ids, Overlay(jnp.take(self.rows(encoder), place, axis=0), ids >= vocab))
