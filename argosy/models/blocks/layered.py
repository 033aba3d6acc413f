"""`LayeredDenoiser`: denoisers whose layers follow each other, in three parts.

    streams, step = begin(latents, timestep, conditions)        streams = layered(streams, step)        end(streams, step)

Who runs the parts one by one may leave out layers, as step caching does (`infer.denoise.step_cache`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import dynamic_index_in_dim
from jaxtyping import Array, Float

from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.stack import Stack, Streams
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
    residuals: what ControlNets add to tokens of the image after layers, by the name of the stack: [R B T D] of each ControlNet. None:
        nothing.
    """

    attend: Attend
    condition: Any
    c: Array
    size: tuple[int, int]
    frames: int | None = None
    residuals: Mapping[str, Sequence[Float[Array, "R B T D"]]] | None = None


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
        return self.run_with_residuals("layers", streams, step, *SPANS[part])

    def run_with_residuals(self, name: str, streams: Streams, step: DenoiserStep, start: int = 0, stop: int | None = None) -> Streams:
        """Layers of one stack, after each of which what ControlNets give for it is added."""
        stack, residuals = getattr(self, name), (step.residuals or {}).get(name, ())
        places = [self.residual_places(len(stack.plan), len(values)) for values in residuals]
        after = partial(_with_residuals, list(zip(residuals, places))) if places else None
        return run_layers(stack, streams, step.attend, step.condition, start, stop, after)

    def residual_places(self, layers: int, residuals: int) -> Sequence[int | None]:
        """For each layer of a stack, which of so many residuals of a ControlNet is added after it; None: none is."""
        raise NotImplementedError

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
        z = self.run_with_residuals("single_layers", z, step)
        return {"image": z[:, cut:], "text": z[:, :cut]}


def _with_residuals(residuals: Sequence[tuple[Array, Sequence[int | None]]], streams: Streams, layer: Any) -> Streams:
    """Streams with the residuals of a layer added to the tokens of the image, which are the last ones where text comes before them.

    Args:
        residuals: [R B T D], and for each layer the place of its own.
        layer: its number, which a scan traces.
    """
    is_apart = isinstance(streams, dict)
    x = streams["image"] if is_apart else streams
    for values, places in residuals:
        if isinstance(layer, int):
            added = None if places[layer] is None else values[places[layer]]
        else:
            at = jnp.asarray(np.array([-1 if place is None else place for place in places]))[layer]
            added = jnp.where(at < 0, 0, dynamic_index_in_dim(values, jnp.maximum(at, 0), keepdims=False))
        if added is not None:
            # No scatter, for whose window a mesh that splits tokens would gather them.
            x = x + jnp.pad(added.astype(x.dtype), ((0, 0), (x.shape[1] - added.shape[1], 0), (0, 0)))
    return streams | {"image": x} if is_apart else x
