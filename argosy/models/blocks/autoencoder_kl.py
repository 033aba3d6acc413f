"""The module of the variational autoencoder (`models.autoencoders.autoencoder_kl` has the equations)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.conv import twice
from argosy.models.parts.net import grow, net_attention, resnet, run_part
from argosy.models.parts.stack.remat import Remat
from argosy.models.parts.weight import Draw, Meaning, Moved, weight
from argosy.ops.precision import sums_in

# The bounds of the log variance: a variance that over- or underflows has no gradient.
LOG_VARIANCE = (-30.0, 20.0)


class Moments(NamedTuple):
    """What the encoder says of latents, float32 at least.

    mean, log_variance: of each number.
    """

    mean: Float[Array, "B h w C"]
    log_variance: Float[Array, "B h w C"]

    def sample(self, noise: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        """Latents, from standard normal numbers."""
        return self.mean + jnp.exp(0.5 * self.log_variance) * noise


class AutoencoderKL(nnx.Module):
    """Images to latents and back. `dtype` is the type of activations.

    Args:
        remat: what the backward pass computes again of a residual block (`parts.stack.remat`).
    """

    def __init__(self, config: Any, remat: Remat = "none"):
        self.config, self.dtype = config, jnp.float32
        self.remat: Remat = remat
        grow(self, config.sites(), groups=config.groups, late=True)

    def encode(self, images: Float[Array, "B H W 3"]) -> Moments:
        """The moments of latents."""
        of: Any = self
        x = self._ends(of.encoder, self._middle(of.encoder.mid_block, self.maps(images)[-1]))
        x = of.quant_conv(x) if self.config.moments_conv else x
        mean, log_variance = jnp.split(x.astype(sums_in(x.dtype)), 2, -1)
        return Moments(mean, jnp.clip(log_variance, *LOG_VARIANCE))

    def maps(self, images: Float[Array, "B H W 3"]) -> list[Float[Array, "B h w K"]]:
        """The encoder's features after each level."""
        of: Any = self
        x, maps = of.encoder.conv_in(images.astype(self.dtype)), []
        for i in range(len(self.config.widths)):
            x = self._level(of.encoder.down_blocks[i], x, self.config.layers)
            maps.append(x)
        return maps

    def decode(self, latents: Float[Array, "B h w C"]) -> Float[Array, "B H W 3"]:
        """Images in -1..1, or a little beyond; float32 at least."""
        of: Any = self
        x = latents.astype(self.dtype)
        x = of.post_quant_conv(x) if self.config.latents_conv else x
        x = self._middle(of.decoder.mid_block, of.decoder.conv_in(x))
        for i in range(len(self.config.widths)):
            x = self._level(of.decoder.up_blocks[i], x, self.config.layers + 1)
        x = self._ends(of.decoder, x)
        return x.astype(sums_in(x.dtype))

    def to_latents(self, moments: Moments, noise: Float[Array, "B h w C"] | None = None) -> Float[Array, "B h w C"]:
        """What denoisers read: the mean, or a sample with `noise`."""
        return self.config.to_latents(moments.mean if noise is None else moments.sample(noise))

    def from_latents(self, latents: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        """What `decode` reads, from a denoiser's latents."""
        return self.config.from_latents(latents)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B H W 3"]:
        """The images again, by way of the means of their latents."""
        return self.decode(self.encode(images).mean)

    def _level(self, of: Any, x: Array, layers: int) -> Array:
        for i in range(layers):
            x = run_part(resnet, of.resnets[i], x, self.remat)
        if hasattr(of, "downsamplers"):
            return of.downsamplers[0].conv(x)
        return of.upsamplers[0].conv(twice(x)) if hasattr(of, "upsamplers") else x

    def _middle(self, of: Any, x: Array) -> Array:
        x = resnet(of.resnets[0], x)
        if self.config.attention:
            attention, (B, H, W, C) = of.attentions[0], x.shape
            flat = attention.group_norm(x).reshape(B, H * W, C)
            x = x + net_attention(attention, flat, flat, 1).reshape(x.shape)
        return resnet(of.resnets[1], x)

    def _ends(self, of: Any, x: Array) -> Array:
        return of.conv_out(jax.nn.silu(of.conv_norm_out(x)))


class PackedStatistics(nnx.Module):
    """Mean and variance of each channel of packed latents."""

    def __init__(self, channels: int):
        self.mean = weight((channels,), Meaning("C", legend=(("C", "packed"),)), Draw("constant", 0.0), Moved)
        self.variance = weight((channels,), Meaning("C", legend=(("C", "packed"),)), Draw("constant", 1.0), Moved)


class AutoencoderKLFlux2(AutoencoderKL):
    """The autoencoder of Flux.2 (`models.autoencoders.autoencoder_kl_flux2` has the equations)."""

    def __init__(self, config: Any, remat: Remat = "none"):
        super().__init__(config, remat)
        self.bn = PackedStatistics(config.latent_channels * 4)

    def to_latents(self, moments: Moments, noise: Float[Array, "B h w C"] | None = None) -> Float[Array, "B g v P"]:
        z = moments.mean if noise is None else moments.sample(noise)
        B, h, w, C = z.shape
        packed = z.reshape(B, h // 2, 2, w // 2, 2, C).transpose(0, 1, 3, 5, 2, 4).reshape(B, h // 2, w // 2, 4 * C)
        return (packed - self.bn.mean[...]) / self._deviation()

    def from_latents(self, latents: Float[Array, "B g v P"]) -> Float[Array, "B h w C"]:
        packed = latents * self._deviation() + self.bn.mean[...]
        B, h, w, P = packed.shape
        return packed.reshape(B, h, w, P // 4, 2, 2).transpose(0, 1, 4, 2, 5, 3).reshape(B, 2 * h, 2 * w, P // 4)

    def _deviation(self) -> Array:
        return jnp.sqrt(self.bn.variance[...] + self.config.stats_eps)
