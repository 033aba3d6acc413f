"""The module of tiny autoencoders (`models.autoencoders.autoencoder_tiny` has the equations)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.conv import twice
from argosy.models.parts.net import grow
from argosy.ops.precision import sums_in


class AutoencoderTiny(nnx.Module):
    """Encodes images to latents, and decodes latents. The attribute `dtype` is the type of activations."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        grow(self, config.sites(), groups=config.pool_groups, eps=1e-5)

    def encode(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        """Encodes images in -1..1 to latents; float32 at least."""
        of: Any = self
        x = self._steps(of.encoder.layers, self.config.encoder_steps, (images.astype(self.dtype) + 1) / 2)
        return x.astype(sums_in(x.dtype))

    def decode(self, latents: Float[Array, "B h w C"]) -> Float[Array, "B H W 3"]:
        """Decodes latents to images in about -1..1, without clipping; float32 at least."""
        of: Any = self
        most = self.config.magnitude
        x = self._steps(of.decoder.layers, self.config.decoder_steps, jnp.tanh(latents.astype(self.dtype) / most) * most)
        return 2 * x.astype(sums_in(x.dtype)) - 1

    def to_latents(self, encoded: Float[Array, "B h w C"], noise: Any = None) -> Float[Array, "B h w C"]:
        """Normalizes the encoder's latents to those that denoisers read. `noise` is not read."""
        return self.config.to_latents(encoded)

    def from_latents(self, latents: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        """Undoes the normalization of `to_latents`: maps a denoiser's latents to those that `decode` reads."""
        return self.config.from_latents(latents)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B H W 3"]:
        """Reconstructs images from their latents."""
        return self.decode(self.encode(images))

    def _steps(self, layers: Any, steps: Sequence[Any], x: Array) -> Array:
        for step in steps:
            if step.kind == "relu":
                x = jax.nn.relu(x)
            elif step.kind == "up":
                x = twice(x)
            elif step.kind == "conv":
                x = layers[step.number](x)
            else:
                x = self._block(layers[step.number], x, step.pools)
        return x

    def _block(self, of: Any, x: Array, pools: bool) -> Array:
        if pools:
            x = x + of.pool[3](jax.nn.relu(of.pool[1](of.pool[0](x))))
        y = x
        for j in (0, 2, 4):
            y = of.conv[j](y if not j else jax.nn.relu(y))
        return jax.nn.relu(y + x)
