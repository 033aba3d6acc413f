"""The module of learned embeddings (`models.diffusion.learned_embeddings` has the equations)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.inputs import Inputs, Overlay
from argosy.models.parts.weight import Draw, Meaning, weight

# The standard deviation of CLIP's own embedding. Training replaces this initialization by the embedding of a word.
SCALE = 0.02
LEGEND = (("J", "learned_tokens"),)


class LearnedEmbeddings(nnx.Module):
    """Maps prompts that contain a learned token to the inputs of text encoders (textual inversion)."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        for name, width in zip(config.encoders, config.widths, strict=True):
            setattr(self, name, weight((config.vectors, width), Meaning("JD", legend=LEGEND), Draw("normal", SCALE)))

    def rows(self, encoder: str) -> Float[Array, "J D"]:
        """Returns the J learned embeddings of the token for a text encoder, given by its name."""
        return getattr(self, encoder)[...]

    def inputs(self, encoder: str, ids: Int[Array, "B T"], vocab: int) -> Inputs:
        """Returns the inputs of a text encoder, with learned embeddings in place of the learned token.

        Args:
            ids: the token ids of prompts. Id `vocab` + i stands for the i-th learned embedding.
            vocab: the size of the encoder's own vocabulary.
        """
        place = jnp.maximum(ids - vocab, 0)
        return Inputs(ids, Overlay(jnp.take(self.rows(encoder), place, axis=0), ids >= vocab))
