"""The module of a ControlNet of Flux.1 (`models.diffusion.controlnets.flux` has the equations)."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.models.blocks.controlnets.mmdit import control_patch, zero_projection
from argosy.models.blocks.flux import DoubleBlock, FluxLayers, SingleBlock
from argosy.models.blocks.mmdit import LEGEND, JointCondition
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.patches import patchify
from argosy.models.parts.stack import Execution
from argosy.models.settings import Reach


class ControlDoubleBlock(DoubleBlock):
    """A `DoubleBlock` that also computes the ControlNet's residual for the image tokens, as the aux output `control`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.control = zero_projection(config.dims)

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        x, cache, outputs = super().__call__(x, each, cache, attend, condition)
        return x, cache, outputs | {"control": self.control(x["image"])}


class ControlSingleBlock(SingleBlock):
    """A `SingleBlock` that also computes the ControlNet's residual for text and image tokens, as the aux output `control`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.control = zero_projection(config.dims)

    def __call__(self, x: Float[Array, "B T D"], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        x, cache, outputs = super().__call__(x, each, cache, attend, condition)
        return x, cache, outputs | {"control": self.control(x)}


class FluxControlNet(FluxLayers):
    """Computes residuals that Flux adds after its layers, from noisy latents, time steps, texts and latents of control images."""

    double_block: ClassVar[Any] = ControlDoubleBlock
    single_block: ClassVar[Any] = ControlSingleBlock

    def __init__(self, config: Any, run: Execution | None):
        super().__init__(config, run)
        self.control_patch = control_patch(config.dims)
        self.modes_embed = None if config.modes is None else Einsum("BTU,UD->BTD", config.dims, scale=0.02, legend=LEGEND)

    def __call__(
        self,
        latents: Float[Array, "B H W C"],
        timestep: Float[Array, "B"],
        conditions: Conditions,
        control: Float[Array, "B H W C"],
        mode: Int[Array, "B"] | None = None,
        tokens: Float[Array, "B T D"] | None = None,
    ) -> dict[str, Float[Array, "R B T D"]]:
        """Computes residuals for image tokens: R residuals for each stack of layers of the denoiser, by the stack's name.

        Args:
            control: the latents of control images.
            mode: the kind of control, for ControlNets that know several.
            tokens: not read.
        """
        streams, step = self.begin(latents, timestep, conditions._replace(control=control, control_mode=mode))
        streams, _, outputs = self.layers(streams, None, step.attend, step.condition)
        residuals = {"layers": outputs["block"]["control"]}
        if not self.config.single_layers:
            return residuals
        cut = streams["text"].shape[1]
        z = jnp.concatenate([streams["text"], streams["image"]], 1)
        _, _, outputs = self.single_layers(z, None, step.attend, step.condition)
        return residuals | {"single_layers": outputs["block"]["control"][:, :, cut:]}

    def tokens(self, latents: Float[Array, "B H W C"], conditions: Conditions) -> tuple[Float[Array, "B T D"], Float[Array, "B S D"]]:
        image, text = super().tokens(latents, conditions)
        image = image + self.control_patch(patchify(conditions.control.astype(self.dtype), self.config.patch))
        if self.modes_embed is None:
            return image, text
        if conditions.control_mode is None:
            raise ValueError("this ControlNet reads the number of the kind of control")
        kind = self.modes_embed.take(conditions.control_mode)[:, None].astype(text.dtype)
        return image, jnp.concatenate([kind, text], 1)
