"""`LayeredDenoiser`: the base of denoisers that are a sequence of layers. A call has three steps.

    streams, step = begin(latents, timestep, conditions)        streams = layered(streams, step)        end(streams, step)

A caller that runs the three steps by itself can skip layers, as step caching does (`infer.denoise.step_cache`).
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
# The first layer of each part, and the layer after its last; None: the number of layers.
SPANS: dict[str, tuple[int, int | None]] = {"all": (0, None), "first": (0, 1), "rest": (1, None)}


class DenoiserStep(NamedTuple):
    """The inputs of the layers and of `end` at a time step, besides the streams.

    attend: the attention strategy.
    condition: the condition that every layer gets (`parts.stack`).
    c: the embedding of the time step.
    size: the height and width of the latents.
    frames: the number of latent frames of a video. None: the latents are those of an image.
    residuals: the residuals that ControlNets add to image tokens after layers, by the name of the stack, [R B T D] for each ControlNet.
        None: there are no ControlNets.
    """

    attend: Attend
    condition: Any
    c: Array
    size: tuple[int, int]
    frames: int | None = None
    residuals: Mapping[str, Sequence[Float[Array, "R B T D"]]] | None = None


class LayeredDenoiser(nnx.Module):
    """Maps noisy latents, time steps and conditions to predictions, with layers over tokens.

    config: the family's config.
    layers: the layers over the token streams.
    """

    config: Any
    layers: Stack

    def begin(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> tuple[Any, DenoiserStep]:
        """Computes the input of the first layer, one array or {image, text}. Also returns the other inputs of the layers."""
        raise NotImplementedError

    def layered(self, streams: Any, step: DenoiserStep, part: LayerPart = "all") -> Any:
        """Runs a part of the layers: all, only the first, or all others. Returns the streams."""
        return self.run_with_residuals("layers", streams, step, *SPANS[part])

    def run_with_residuals(self, name: str, streams: Streams, step: DenoiserStep, start: int = 0, stop: int | None = None) -> Streams:
        """Runs the layers `start` to `stop` of a stack. Adds the residuals of ControlNets after each layer.

        Args:
            name: the attribute that holds the stack.
        """
        stack, residuals = getattr(self, name), (step.residuals or {}).get(name, ())
        places = [self.residual_places(len(stack.plan), len(values)) for values in residuals]
        after = partial(_with_residuals, list(zip(residuals, places))) if places else None
        return run_layers(stack, streams, step.attend, step.condition, start, stop, after)

    def residual_places(self, layers: int, residuals: int) -> Sequence[int | None]:
        """Returns, for each layer of a stack, the index of the ControlNet residual that is added after the layer. None: none is added.

        Args:
            layers: the number of layers of the stack.
            residuals: the number of residuals that the ControlNet computes for the stack.
        """
        raise NotImplementedError

    def end(self, streams: Any, step: DenoiserStep) -> Float[Array, "B *F H W C"]:
        """Computes the prediction from the output of the last layer."""
        raise NotImplementedError

    def __call__(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> Float[Array, "B *F H W C"]:
        streams, step = self.begin(latents, timestep, conditions)
        return self.end(self.layered(streams, step), step)


class SingleStreamDenoiser(LayeredDenoiser):
    """A denoiser whose first layers have separate weights for image and text, and whose last layers read both as one stream.

    single_layers: the last layers.
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
    """Adds ControlNets' residuals for a layer to the image tokens of the streams. In a single stream, image tokens come after the text.

    Args:
        residuals: for each ControlNet, the residuals [R B T D], and for each layer the index of its residual.
        layer: the index of the layer. It is traced in a scan.
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
            # Pads instead of scattering. For a scatter, a mesh that splits tokens would gather them.
            x = x + jnp.pad(added.astype(x.dtype), ((0, 0), (x.shape[1] - added.shape[1], 0), (0, 0)))
    return streams | {"image": x} if is_apart else x
