"""`LayeredDenoiser`: denoisers whose layers follow each other, in three parts.

    streams, step = begin(latents, timestep, conditions)        streams = layered(streams, step)        end(streams, step)

Who runs the parts one by one may leave out layers, as step caching does (`infer.denoise.step_cache`).
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.stack import Stack
from argosy.models.parts.stack.layer_range import run_layers

LayerPart = Literal["all", "first", "rest"]
# From which layer to which each part goes.
SPANS: dict[str, tuple[int, int | None]] = {"all": (0, None), "first": (0, 1), "rest": (1, None)}


class DenoiserStep(NamedTuple):
    """What layers and output read at a time step.

    attend: how tokens see each other.
    condition: what layers get.
    c: the vector of the time step.
    size: height and width of the latents.
    frames: of the latents of a video; None: they are those of an image.
    """

    attend: Attend
    condition: Any
    c: Array
    size: tuple[int, int]
    frames: int | None = None


class LayeredDenoiser(nnx.Module):
    """Noisy latents, time steps and conditions to predictions, by layers over tokens.

    config: of its family.
    layers: over the streams of tokens.
    """

    config: Any
    layers: Stack

    def begin(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> tuple[Any, DenoiserStep]:
        """The input of the first layer (an array, or {image, text}), and what every layer reads besides."""
        raise NotImplementedError

    def layered(self, streams: Any, step: DenoiserStep, part: LayerPart = "all") -> Any:
        """The streams after the layers, after the first one, or from there after the rest."""
        return run_layers(self.layers, streams, step.attend, step.condition, *SPANS[part])

    def end(self, streams: Any, step: DenoiserStep) -> Float[Array, "B *F H W C"]:
        """The prediction, of what the last layer gave."""
        raise NotImplementedError

    def __call__(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> Float[Array, "B *F H W C"]:
        streams, step = self.begin(latents, timestep, conditions)
        return self.end(self.layered(streams, step), step)


class SingleStreamDenoiser(LayeredDenoiser):
    """A denoiser whose first layers have weights for the image and for the text, and whose last ones read both as one stream.

    single_layers: the last ones.
    """

    single_layers: Stack

    def layered(self, streams: dict[str, Array], step: DenoiserStep, part: LayerPart = "all") -> dict[str, Array]:
        streams = super().layered(streams, step, part)
        if part == "first":
            return streams
        z, cut = jnp.concatenate([streams["text"], streams["image"]], 1), streams["text"].shape[1]
        z, _, _ = self.single_layers(z, None, step.attend, step.condition)
        return {"image": z[:, cut:], "text": z[:, :cut]}
