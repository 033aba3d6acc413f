"""`ImageAutoencoder`: encodes images to latents and decodes them. `argosy.load` of an autoencoder's folder or run returns it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.infer.denoise.finite import check_finite
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.parts.weight import merge, split


class ImageAutoencoder:
    """An autoencoder of images or videos.

    Args:
        module: the module, such as that of AutoencoderKL or AutoencoderTiny.
    """

    def __init__(self, module: Any):
        self.module = module
        self.config: AutoencoderConfig = module.config
        self._graph, self._leaves = split(module)

    @property
    def factor(self) -> int:
        """The ratio of an image's height and width to those of its latents."""
        return self.config.factor

    def encode(self, images: Float[Any, "B *F H W c"]) -> Float[np.ndarray, "B *G h w C"]:
        """Encodes images [B H W c] or videos [B F H W c] in 0..1 to normalized latents, as denoisers read them. If the encoder returns
        a distribution, the latents are its mean.

        Raises:
            BadInput: heights or widths are no multiples of `factor`, the images have another number of channels, or the number of
                frames does not fit.
            ArgosyError: the latents are not finite.
        """
        shape = np.shape(images)
        pace = self.config.frame_factor
        if len(shape) == 5 and pace:
            latent_frames(shape[1], pace)
        elif len(shape) != 4:
            raise BadInput(f"images of {list(shape)}: this autoencoder reads [B H W {self.config.channels}]")
        if shape[-1] != self.config.channels or shape[-3] % self.factor or shape[-2] % self.factor:
            expected = f"{self.config.channels} channels, and sides that are multiples of {self.factor}"
            raise BadInput(f"images of {list(shape)}: this autoencoder reads {expected}")
        latents = np.asarray(_encoder(self._graph)(self._leaves, jnp.asarray(images, jnp.float32) * 2 - 1))
        check_finite("the autoencoder's encoder", latents)
        return latents

    def decode(self, latents: Float[Any, "B *G h w C"]) -> Float[np.ndarray, "B *F H W c"]:
        """Decodes normalized latents to images or videos in 0..1.

        Raises:
            ArgosyError: the images are not finite.
        """
        images = np.asarray(_decoder(self._graph)(self._leaves, jnp.asarray(latents)), np.float32)
        check_finite("the autoencoder's decoder", images)
        return np.clip(images / 2 + 0.5, 0, 1)


def latent_frames(frames: int, pace: int) -> int:
    """The number of latent frames for a video of `frames` frames.

    Args:
        pace: number of video frames for each latent frame after the first (`AutoencoderConfig.frame_factor`).

    Raises:
        BadInput: `frames` is not a multiple of `pace`, plus 1.
    """
    if frames < 1 or (frames - 1) % pace:
        lower = max(0, frames - 1) // pace * pace + 1
        near = f"frames={lower}" if frames < 1 else f"frames={lower} or frames={lower + pace}"
        raise BadInput(f"frames = {frames}: videos of this model have a multiple of {pace}, and one more", hint=near)
    return 1 + (frames - 1) // pace


@lru_cache(maxsize=8)
def _decoder(graph: Any) -> Callable[..., Array]:
    def decode(leaves: Any, latents: Array) -> Array:
        model = merge(graph, leaves)
        return model.decode(model.from_latents(latents))

    return jax.jit(decode)


@lru_cache(maxsize=8)
def _encoder(graph: Any) -> Callable[..., Array]:
    def encode(leaves: Any, images: Array) -> Array:
        model = merge(graph, leaves)
        return model.to_latents(model.encode(images))

    return jax.jit(encode)
