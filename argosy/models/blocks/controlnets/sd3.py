"""The module of a ControlNet of Stable Diffusion 3 (`models.diffusion.controlnets.sd3` has the equations)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.controlnets.mmdit import control_patch, zero_projection
from argosy.models.blocks.mmdit import LEGEND, JointCondition, JointStream, VectorEmbedder, joint_attention
from argosy.models.blocks.sd3 import SD3Block, SD3Layers
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.modulation import modulate
from argosy.models.parts.patches import patchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.settings import Reach


class ControlBlock(SD3Block):
    """An `SD3Block` that also computes the ControlNet's residual for the image tokens, as the aux output `control`."""

    def __init__(self, config: Any, kind: str):
        super().__init__(config, kind)
        self.control = zero_projection(config.dims)

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        x, cache, outputs = super().__call__(x, each, cache, attend, condition)
        return x, cache, outputs | {"control": self.control(x["image"])}


class ImageControlBlock(nnx.Module):
    """A layer over image tokens only, whose aux output `control` is the ControlNet's residual."""

    def __init__(self, config: Any):
        self.image = JointStream(config.dims, 6, norms=config.normalizes)
        self.control = zero_projection(config.dims)

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        m, of = self.image.modulated(condition.c), self.image
        y = joint_attention([of.attn(modulate(x["image"], m[0], m[1]))], attend)
        h = x["image"] + m[2][:, None] * of.attn.o(y)  # pyright: ignore[reportOptionalCall]
        h = h + m[5][:, None] * of.mlp(modulate(h, m[3], m[4]))  # pyright: ignore[reportOptionalCall]
        return {"image": h}, cache, {"control": self.control(h)}


class SD3ControlNet(SD3Layers):
    """Computes residuals that the denoiser adds after its layers, from noisy latents, time steps, texts and control images' latents."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        if config.positions:
            self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
            self.positions = Einsum("BTA,AD->BTD", d, scale=0.02)
        self.text_embed = None if config.text_width is None else Einsum("BTS,SD->BTD", d, bias=True, legend=LEGEND)
        self.vector = VectorEmbedder(config, False)
        self.control_patch = control_patch(d)
        plan = [Layer(kind, Reach()) for kind in config.kinds]
        self.layers = Stack(plan, self.block, run=run)

    def block(self, kind: str) -> Any:
        """Builds a layer of this kind."""
        return ImageControlBlock(self.config) if kind == "alone" else ControlBlock(self.config, kind)

    def __call__(
        self,
        latents: Float[Array, "B H W C"],
        timestep: Float[Array, "B"],
        conditions: Conditions,
        control: Float[Array, "B H W C"],
        mode: Any = None,
        tokens: Float[Array, "B T D"] | None = None,
    ) -> dict[str, Float[Array, "R B T D"]]:
        """Computes R residuals for the image tokens of the denoiser's stack `layers`.

        Args:
            control: the latents of control images.
            mode: not read.
            tokens: the image tokens that the denoiser computes from the latents. Only ControlNets without positions read them.
        """
        config = self.config
        x = self.tokens(latents) if config.positions else tokens
        if x is None:
            raise ValueError("this ControlNet reads the tokens of the model that it steers")
        streams = {"image": x + self.control_patch(patchify(control.astype(self.dtype), config.patch))}
        streams |= {} if self.text_embed is None else {"text": self.text_embed(conditions.text.astype(self.dtype))}
        pooled = jnp.zeros_like(conditions.pooled) if config.zero_pooled else conditions.pooled
        streams, step = self.embed_conditions(streams, timestep, pooled, latents.shape[1:3])
        _, _, outputs = self.layers(streams, None, step.attend, step.condition)
        residuals: list[Any] = [None] * config.layers
        for kind, indexes in self.layers.indexes().items():
            for place, i in enumerate(indexes):
                residuals[i] = outputs[kind]["control"][place]
        return {"layers": jnp.stack(residuals)}
