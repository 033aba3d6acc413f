"""The module of Flux.1 (`models.diffusion.flux` has the equations)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, SingleStreamDenoiser
from argosy.models.blocks.mmdit import (
    LEGEND,
    FinalLayer,
    JointCondition,
    JointStream,
    Projections,
    VectorEmbedder,
    axial_turns,
    joint_attention,
)
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.modulation import modulate
from argosy.models.parts.patches import patchify, unpatchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.settings import Reach
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


class DoubleBlock(nnx.Module):
    """A double-stream layer: image and text have separate weights and attend jointly. The streams are {image, text}."""

    def __init__(self, config: Any):
        self.image, self.text = (JointStream(config.dims, 6, norms=True) for _ in range(2))

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        streams: dict[str, Any] = {"text": self.text, "image": self.image}
        m = {name: stream.modulated(condition.c) for name, stream in streams.items()}
        read = [stream.attn(modulate(x[name], m[name][0], m[name][1])) for name, stream in streams.items()]
        y = joint_attention(read, attend, condition.turns)
        cut = x["text"].shape[1]
        apart = {"text": y[:, :cut], "image": y[:, cut:]}
        out = {}
        for name, stream in streams.items():
            h = x[name] + m[name][2][:, None] * stream.attn.o(apart[name])
            out[name] = h + m[name][5][:, None] * stream.mlp(modulate(h, m[name][3], m[name][4]))
        return out, cache, {}


class SingleBlock(nnx.Module):
    """A single-stream layer over text and image tokens. Attention and the feed-forward layer are parallel."""

    def __init__(self, config: Any):
        d = config.dims
        self.modulation = Einsum("BD,DGM->BGM", d | {"G": 3}, bias=True, scale=0.0, legend=LEGEND)
        self.attn = Projections(d, norms=True)
        self.up = Einsum("BTD,DF->BTF", d, bias=True)
        self.down = Einsum("BTF,FD->BTD", d)

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: Float[Array, "B T D"], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        shift, scale, gate = jnp.unstack(self.modulation(jax.nn.silu(condition.c)), axis=1)
        h = modulate(x, shift, scale)
        y = joint_attention([self.attn(h)], attend, condition.turns)
        mixed = self.attn.o(y) + self.down(jax.nn.gelu(self.up(h), approximate=True))  # pyright: ignore[reportOptionalCall]
        return x + gate[:, None] * mixed, cache, {}


class FluxLayers(nnx.Module):
    """The shared base of Flux and its ControlNets: embeds noisy latents, time steps and texts, and has the layers."""

    double_block: ClassVar[Any] = DoubleBlock
    single_block: ClassVar[Any] = SingleBlock

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.text_embed = Einsum("BTS,SD->BTD", d, bias=True, legend=LEGEND)
        self.vector = VectorEmbedder(config, config.guided)
        self.layers = Stack([Layer("block", Reach())] * config.layers, lambda kind: self.double_block(config), run=run)
        single = [Layer("block", Reach())] * config.single_layers
        self.single_layers = Stack(single, lambda kind: self.single_block(config), run=run)

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        height, width = latents.shape[1:3]
        x, text = self.tokens(latents, conditions)
        x = constrain(x, "B T D")
        c = self.vector(timestep, conditions.pooled, conditions.guidance, self.dtype)
        attend = Bidirectional.whole_rows(x.shape[0], text.shape[1] + x.shape[1])
        condition = JointCondition(c, self.turns(x.shape[0], text.shape[1], height, width))
        return {"image": x, "text": text}, DenoiserStep(attend, condition, c, (height, width))

    def tokens(self, latents: Float[Array, "B H W C"], conditions: Conditions) -> tuple[Float[Array, "B T D"], Float[Array, "B S D"]]:
        """Computes the tokens of image and text."""
        image = self.patch(patchify(latents.astype(self.dtype), self.config.patch))
        return image, self.text_embed(conditions.text.astype(self.dtype))

    def turns(self, rows: int, text: int, height: int, width: int) -> tuple[Array, Array]:
        """Computes cosines and sines [rows T P] of the positions: row and column for patches, 0 for all text tokens.

        Args:
            rows: the batch size.
            text: the number of text tokens.
            height, width: the size of the latents.
        """
        at = np.stack(np.meshgrid(np.arange(height // self.config.patch), np.arange(width // self.config.patch), indexing="ij"), -1)
        patches = np.pad(at.reshape(-1, 2), ((0, 0), (1, 0)))
        cos, sin = axial_turns(np.concatenate([np.zeros((text, 3)), patches]), self.config.axes)
        return jnp.broadcast_to(cos, (rows, *cos.shape)), jnp.broadcast_to(sin, (rows, *sin.shape))


class Flux(FluxLayers, SingleStreamDenoiser):
    """Maps noisy latents, time steps and texts to velocities."""

    def __init__(self, config: Any, run: Execution | None):
        super().__init__(config, run)
        self.final = FinalLayer(config.dims)

    def end(self, streams: dict[str, Array], step: DenoiserStep) -> Float[Array, "B H W C"]:
        y = self.final(streams["image"], step.c)
        return unpatchify(y.astype(sums_in(y.dtype)), *step.size, self.config.patch)

    def residual_places(self, layers: int, residuals: int) -> list[int | None]:
        return [i // -(-layers // residuals) for i in range(layers)]
