"""The module of a ControlNet of a UNet (`models.diffusion.controlnets.unet` has the equations), and a UNet with ControlNets."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.unet import UNet, UNetEncoder
from argosy.models.diffusion.base import Conditions


class ControlNet(UNetEncoder):
    """Computes residuals that a UNet adds to its skips and its middle, from noisy latents, time steps, texts and control images."""

    def __call__(
        self,
        latents: Float[Array, "B H W C"],
        timestep: Float[Array, "B"],
        conditions: Conditions,
        control: Float[Array, "B Y X 3"],
        scale: Float[Array, "B R"] | None = None,
    ) -> list[Array]:
        """Computes a residual [B h w O] for each skip, then one for the middle.

        Args:
            control: control images in 0..1, in pixels.
            scale: a factor on each of the R residuals. None: 1.
        """
        of: Any = self
        height, width = control.shape[1:3]
        c = self.condition(timestep, conditions, height, width)
        x = of.conv_in(latents.astype(self.dtype)) + self.embedded(control)
        skips, middle = self.encoded(x, c, conditions.text.astype(self.dtype))
        residuals = [of.controlnet_down_blocks[i](skip) for i, skip in enumerate(skips)] + [of.controlnet_mid_block(middle)]
        if scale is None:
            return residuals
        return [residual * scale[:, i, None, None, None].astype(residual.dtype) for i, residual in enumerate(residuals)]

    def embedded(self, control: Float[Array, "B Y X 3"]) -> Float[Array, "B H W C"]:
        """Embeds control images in 0..1. The result has the height and width of latents."""
        of: Any = self
        net, y = of.controlnet_cond_embedding, control.astype(self.dtype)
        y = net.conv_in(y[..., ::-1] if self.config.channel_order == "bgr" else y)
        for i in range(2 * len(self.config.embedding) - 2):
            y = net.blocks[i](jax.nn.silu(y))
        return net.conv_out(jax.nn.silu(y))


class ControlledUNet(nnx.Module):
    """A UNet that ControlNets steer. It is called like the UNet.

    ControlNets act if there are control images. Their residuals are summed.
    """

    def __init__(self, unet: UNet, controlnets: Sequence[ControlNet]):
        self.unet, self.controlnets = unet, nnx.List(controlnets)

    @property
    def config(self) -> Any:
        return self.unet.config

    def __call__(
        self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> Float[Array, "B H W C"]:
        if conditions.control is None:
            return self.unet(latents, timestep, conditions)

        total: list[Array] = []
        for i, (net, control) in enumerate(zip(self.controlnets, conditions.control, strict=True)):
            scale = None if conditions.control_scale is None else conditions.control_scale[i]
            acts = None if conditions.control_acts is None else conditions.control_acts[i]

            def residuals(net: Any = net, control: Any = control, scale: Any = scale) -> list[Array]:
                return net(latents, timestep, conditions, control, scale)

            def nothing(residuals: Any = residuals) -> list[Array]:
                return [jnp.zeros(shape.shape, shape.dtype) for shape in jax.eval_shape(residuals)]

            more = residuals() if acts is None else jax.lax.cond(acts > 0, residuals, nothing)
            total = [a + b for a, b in zip(total, more, strict=True)] if total else more
        return self.unet(latents, timestep, conditions, total)
