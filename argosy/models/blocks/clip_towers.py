"""The module of CLIP with both towers (`models.clip_towers` has the equations)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.clip import block
from argosy.models.parts.attention.attend import Bidirectional
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import LayerNorm
from argosy.models.parts.patches import patchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.models.settings import Reach
from argosy.parallel.scope import constrain

LEGEND = (("I", "patch"),)


class ClipImageEncoder(nnx.Module):
    """Maps each image to a vector.

    Args:
        config: the settings of the vision tower.
        output: the width O of the vector.
    """

    def __init__(self, config: Any, output: int, run: Execution | None):
        d = config.dims | {"O": output}
        self.config, self.dtype = config, jnp.float32
        self.first = weight((config.width,), Meaning("D"), Draw("normal", config.width**-0.5))
        self.patch = Einsum("BTI,ID->BTD", d, scale=0.02, legend=LEGEND)
        self.positions = Einsum("BTA,AD->BTD", d, scale=0.02)
        self.pre_norm = LayerNorm(config.width, config.norm_eps)
        self.layers = Stack([Layer("block", Reach())] * config.layers, lambda kind: block(config, kind), run=run)
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.pooler = Einsum("BD,DO->BO", d)

    def hidden(self, images: Float[Array, "B H W C"]) -> Float[Array, "B T D"]:
        """Computes the last layer's vectors: first that of the whole image (the class token), then those of patches, row by row."""
        patches = self.patch(patchify(images.astype(self.dtype), self.config.patch))
        rows, count = patches.shape[0], patches.shape[1] + 1
        first = jnp.broadcast_to(self.first[...].astype(patches.dtype), (rows, 1, patches.shape[-1]))
        places = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (rows, count))
        x = jnp.concatenate([first, patches], 1) + self.positions.take(places).astype(patches.dtype)
        x, _, _ = self.layers(self.pre_norm(x), None, Bidirectional.whole_rows(*places.shape))
        return constrain(x, "B T D")

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B O"]:
        """Computes vectors of images, which must already be resized, cropped and normalized."""
        return self.pooler(self.norm(self.hidden(images)[:, 0]))


class ClipTowers(nnx.Module):
    """Maps texts and images to vectors in one space."""

    def __init__(self, config: Any, run: Execution | None):
        self.config = config
        self.text = config.text.build(run)
        self.vision = ClipImageEncoder(config.vision, config.embedding_width, run)
        self.scale = weight((), Meaning(""), Draw("constant", 2.6592))

    @property
    def dtype(self) -> Any:
        """The type of activations of both towers."""
        return self.text.dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.text.dtype = self.vision.dtype = dtype

    def texts(self, tokens: Int[Array, "B T"]) -> Float[Array, "B O"]:
        """Computes vectors of texts. Each text must contain the end-of-text token; tokens after it are not read."""
        return self.text.pooled(self.text.hidden(tokens, self.config.text.attend(jnp.ones_like(tokens)))[0], tokens)

    def images(self, images: Float[Array, "B H W C"]) -> Float[Array, "B O"]:
        """Computes vectors of images, which must already be resized, cropped and normalized."""
        return self.vision(images)

    def __call__(self, images: Float[Array, "B H W C"], tokens: Int[Array, "b T"]) -> Float[Array, "B b"]:
        """Computes the score of each image with each text: exp(scale) times the cosine of their vectors."""
        vectors = (x.astype(jnp.float32) for x in (self.images(images), self.texts(tokens)))
        image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in vectors)
        return jnp.exp(self.scale[...].astype(jnp.float32)) * (image @ text.T)
