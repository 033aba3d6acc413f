"""The module of a ControlNet (`models.diffusion.controlnet` has the equations), and a UNet that it steers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.unet import UNet, UNetEncoder
from argosy.models.diffusion.base import Conditions


class ControlNet(UNetEncoder):
    """Noisy latents, time steps, texts and control images to what a UNet adds on its way up."""

    def __call__(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> list[Array]:
        """The residuals of each skip [B h w O], and last that of the middle; multiplied by `conditions.control_scale`."""
        of: Any = self
        height, width = conditions.control.shape[1:3]
        c = self.condition(timestep, conditions, height, width)
        x = of.conv_in(latents.astype(self.dtype)) + self.embedded(conditions.control)
        left, middle = self.encoded(x, c, conditions.text.astype(self.dtype))
        found = [of.controlnet_down_blocks[i](skip) for i, skip in enumerate(left)] + [of.controlnet_mid_block(middle)]
        if (scale := conditions.control_scale) is None:
            return found
        return [one * scale[:, i, None, None, None].astype(one.dtype) for i, one in enumerate(found)]

    def embedded(self, control: Float[Array, "B Y X 3"]) -> Float[Array, "B H W C"]:
        """A control image in 0..1, at the size of latents."""
        of: Any = self
        net, y = of.controlnet_cond_embedding, control.astype(self.dtype)
        y = net.conv_in(y[..., ::-1] if self.config.channel_order == "bgr" else y)
        for i in range(2 * len(self.config.embedding) - 2):
            y = net.blocks[i](jax.nn.silu(y))
        return net.conv_out(jax.nn.silu(y))


class ControlledUNet(nnx.Module):
    """A UNet with a ControlNet, which acts where there is a control image: called like the UNet."""

    def __init__(self, unet: UNet, controlnet: ControlNet):
        self.unet, self.controlnet = unet, controlnet

    @property
    def config(self) -> Any:
        return self.unet.config

    def __call__(
        self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> Float[Array, "B H W C"]:
        if conditions.control is None:
            return self.unet(latents, timestep, conditions)

        def residuals() -> list[Array]:
            return self.controlnet(latents, timestep, conditions)

        def nothing() -> list[Array]:
            return [jnp.zeros(one.shape, one.dtype) for one in jax.eval_shape(residuals)]

        acts = conditions.control_acts
        found = residuals() if acts is None else jax.lax.cond(acts > 0, residuals, nothing)
        return self.unet(latents, timestep, conditions, found)
