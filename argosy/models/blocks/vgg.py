"""The module of VGG (`models.vgg` has the equations)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.net import grow, run_part
from argosy.models.parts.stack.remat import Remat

# LPIPS's normalization of images in -1..1: mean and deviation of ImageNet's pixels in 0..1.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class VGG(nnx.Module):
    """Images to maps of features. `dtype` is the type of activations.

    Args:
        remat: what the backward pass computes again of a stage (`parts.stack.remat`).
    """

    def __init__(self, config: Any, remat: Remat = "none"):
        self.config, self.dtype = config, jnp.float32
        self.remat: Remat = remat
        # There are no norms.
        grow(self, config.sites(), groups=1)

    def maps(self, images: Float[Array, "B H W C"]) -> list[Float[Array, "B h w K"]]:
        """The features of each stage, of images in -1..1; `H` and `W` are halved, rounded down, from stage to stage."""
        of: Any = self
        x = images
        if self.config.channels == len(SHIFT):
            x = (x - jnp.asarray(SHIFT, x.dtype)) / jnp.asarray(SCALE, x.dtype)
        x, maps = x.astype(self.dtype), []
        for level, numbers in enumerate(self.config.stages):
            x = _halved(x) if level else x
            x = run_part(_stage, [of.features[number] for number in numbers], x, self.remat)
            maps.append(x)
        return maps

    def weighted_sum(self, level: int, differences: Float[Array, "B h w K"]) -> Float[Array, "B h w"]:
        """The sum over channels, each times its weight; without linear layers, every weight is 1."""
        linear = getattr(self, f"lin{level}", None)
        return jnp.sum(differences, -1) if linear is None else linear.model[1](differences)[..., 0]

    def __call__(self, images: Float[Array, "B H W C"]) -> list[Float[Array, "B h w K"]]:
        return self.maps(images)


def _stage(layers: list[Any], x: Float[Array, "B H W C"]) -> Float[Array, "B H W K"]:
    for layer in layers:
        x = jax.nn.relu(layer(x))
    return x


def _halved(x: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
    """The largest of each two by two positions. On CPUs ten times as fast, with its gradient, as XLA's own windows."""
    x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
    rows = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])
