"""The module of Stable Diffusion's UNet (`models.diffusion.unet` has the equations)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.diffusion.base import Conditions
from argosy.models.parts.conv import twice
from argosy.models.parts.modulation import sinusoid
from argosy.models.parts.net import grow, net_attention, resnet
from argosy.ops.precision import sums_in


class UNetEncoder(nnx.Module):
    """The down blocks and the middle block of a UNet."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        grow(self, config.sites(), groups=config.groups, eps=config.norm_eps)

    def encoded(
        self, x: Float[Array, "B H W C"], c: Float[Array, "B E"], text: Float[Array, "B S D"]
    ) -> tuple[list[Array], Float[Array, "B h w O"]]:
        """Runs the down blocks and the middle block. Returns the skips for the up blocks, and the output of the middle block.

        Args:
            x: the output of `conv_in`.
            c: the embedding of the time step (`condition`).
            text: the text states.
        """
        of: Any = self
        skips = [x]
        for level in range(len(self.config.widths)):
            block = of.down_blocks[level]
            for j in range(self.config.layers):
                x = self._layer(block, j, x, c, text, level)
                skips.append(x)
            if hasattr(block, "downsamplers"):
                x = block.downsamplers[0].conv(x)
                skips.append(x)
        x = resnet(of.mid_block.resnets[0], x, c)
        x = self._transformer(of.mid_block.attentions[0], x, text, self.config.heads[-1])
        return skips, resnet(of.mid_block.resnets[1], x, c)

    def condition(self, timestep: Float[Array, "B"], conditions: Conditions, height: int, width: int) -> Float[Array, "B E"]:
        """Computes the embedding of the time step. SDXL adds embeddings of the pooled text and of the image's sizes.

        Args:
            height, width: the size of the image in pixels.
        """
        of: Any = self
        c = _embedded(of.time_embedding, sinusoid(timestep, self.config.widths[0]).astype(self.dtype))
        if self.config.pooled_width is None:
            return c
        sizes = conditions.sizes
        if sizes is None:
            whole = [height, width]
            sizes = jnp.broadcast_to(jnp.asarray([*whole, 0, 0, *whole], jnp.float32), (len(timestep), 6))
        waves = sinusoid(sizes.reshape(-1), self.config.size_waves).reshape(len(timestep), -1).astype(self.dtype)
        return c + _embedded(of.add_embedding, jnp.concatenate([conditions.pooled.astype(self.dtype), waves], -1))

    def _layer(self, block: Any, j: int, x: Array, c: Array, text: Array, level: int) -> Array:
        x = resnet(block.resnets[j], x, c)
        return self._transformer(block.attentions[j], x, text, self.config.heads[level]) if self.config.transformers[level] else x

    def _transformer(self, of: Any, x: Float[Array, "B H W I"], text: Array, heads: int) -> Array:
        B, H, W, C = x.shape
        y = of.norm(x)
        y = of.proj_in(y.reshape(B, H * W, C)) if self.config.linear else of.proj_in(y).reshape(B, H * W, C)
        for j in range(len(of.transformer_blocks)):
            block = of.transformer_blocks[j]
            normed = block.norm1(y)
            y = y + net_attention(block.attn1, normed, normed, heads)
            y = y + net_attention(block.attn2, block.norm2(y), text, heads)
            up, gate = jnp.split(block.ff.net[0].proj(block.norm3(y)), 2, -1)
            y = y + block.ff.net[2](up * jax.nn.gelu(gate, approximate=False))
        y = of.proj_out(y).reshape(x.shape) if self.config.linear else of.proj_out(y.reshape(x.shape))
        return x + y


class UNet(UNetEncoder):
    """Maps noisy latents, time steps and texts to predictions."""

    def __call__(
        self,
        latents: Float[Array, "B H W C"],
        timestep: Float[Array, "B"],
        conditions: Conditions,
        residuals: Sequence[Array] | None = None,
    ) -> Float[Array, "B H W C"]:
        """Computes the prediction, in float32 at least.

        Args:
            residuals: the residuals of ControlNets. They are added to the skips, and the last one to the output of the middle block.
        """
        of: Any = self
        config, text = self.config, conditions.text.astype(self.dtype)
        height, width = (side * config.pixels for side in latents.shape[1:3])
        c = self.condition(timestep, conditions, height, width)
        skips, x = self.encoded(of.conv_in(latents.astype(self.dtype)), c, text)
        if residuals is not None:
            *skips, x = (mine + theirs.astype(self.dtype) for mine, theirs in zip([*skips, x], residuals, strict=True))
        for i in range(len(config.widths)):
            block, level = of.up_blocks[i], len(config.widths) - 1 - i
            for j in range(config.layers + 1):
                x = self._layer(block, j, jnp.concatenate([x, skips.pop()], -1), c, text, level)
            if hasattr(block, "upsamplers"):
                x = block.upsamplers[0].conv(twice(x))
        x = of.conv_out(jax.nn.silu(of.conv_norm_out(x)))
        return x.astype(sums_in(x.dtype))


def _embedded(of: Any, x: Float[Array, "B I"]) -> Float[Array, "B E"]:
    return of.linear_2(jax.nn.silu(of.linear_1(x)))
