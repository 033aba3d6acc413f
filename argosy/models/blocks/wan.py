"""The module of Wan (`models.diffusion.wan` has the equations)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, LayeredDenoiser
from argosy.models.blocks.mmdit import LEGEND, MLPEmbedder, axial_turns, joint_attention
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.attention.cross import cross_attention
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import MLP
from argosy.models.parts.modulation import modulate, sinusoid
from argosy.models.parts.norm import LayerNorm, RMSNorm
from argosy.models.parts.patches import patchify, unpatchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.models.settings import Reach
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


class WanCondition(NamedTuple):
    """The condition of every layer.

    modulation: the G modulation vectors of the time step. A layer adds its own learned table.
    text: the text states.
    turns: the cosines and sines of the positions.
    """

    modulation: Float[Array, "B G D"]
    text: Float[Array, "B S D"]
    turns: tuple[Float[Array, "B T P"], Float[Array, "B T P"]]


class WanProjections(nnx.Module):
    """The projections to queries, keys and values, and the output projection. Queries and keys are normalized across all heads."""

    def __init__(self, config: Any):
        d, width = config.dims, (config.heads, config.head_size)
        self.q = Einsum("BTD,DNH->BTNH", d, bias=True)
        self.k = Einsum("BTD,DKH->BTKH", d, bias=True)
        self.v = Einsum("BTD,DKH->BTKH", d, bias=True)
        self.o = Einsum("BTNH,NHD->BTD", d, bias=True)
        self.q_norm, self.k_norm = (RMSNorm(width, config.norm_eps, letters=letters) for letters in ("NH", "KH"))

    def __call__(self, x: Float[Array, "B T D"], memory: Float[Array, "B S D"]) -> tuple[Array, Array, Array]:
        return self.q_norm(self.q(x)), self.k_norm(self.k(memory)), self.v(memory)


class WanBlock(nnx.Module):
    """A layer: self-attention over the video, cross-attention to the text, and the feed-forward layer."""

    def __init__(self, config: Any):
        self.eps = config.norm_eps
        self.table = weight((6, config.width), Meaning("GD", legend=LEGEND), Draw("normal", config.width**-0.5))
        self.attn, self.cross = WanProjections(config), WanProjections(config)
        self.cross_norm = LayerNorm(config.width, config.norm_eps) if config.cross_attn_norm else None
        self.mlp = MLP(config.dims, "gelu_tanh")

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: Float[Array, "B T D"], each: Reach, cache: Any, attend: Attend, condition: WanCondition) -> Any:
        m = jnp.unstack(condition.modulation + self.table[...].astype(x.dtype), axis=1)
        y = modulate(x, m[0], m[1], self.eps)
        x = x + m[2][:, None] * self.attn.o(joint_attention([self.attn(y, y)], attend, condition.turns))
        y = x if self.cross_norm is None else self.cross_norm(x)
        x = x + self.cross.o(cross_attention(*self.cross(y, condition.text)))
        return x + m[5][:, None] * self.mlp(modulate(x, m[3], m[4], self.eps)), cache, {}


class Wan(LayeredDenoiser):
    """Maps noisy latents of videos or images, time steps and texts to velocities."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.time = MLPEmbedder(d, "W")
        self.modulation = Einsum("BD,DGM->BGM", d | {"G": 6}, bias=True, scale=0.02, legend=LEGEND)
        self.text_up = Einsum("BTS,SE->BTE", d, bias=True, legend=LEGEND)
        self.text_down = Einsum("BTE,ED->BTD", d, bias=True, legend=LEGEND)
        self.layers = Stack([Layer("block", Reach())] * config.layers, lambda kind: WanBlock(config), run=run)
        self.table = weight((2, config.width), Meaning("GD", legend=LEGEND), Draw("normal", config.width**-0.5))
        self.out = Einsum("BTD,DI->BTI", d, bias=True, scale=0.0, legend=LEGEND)

    def begin(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> tuple[Float[Array, "B T D"], DenoiserStep]:
        config, (height, width, channels) = self.config, latents.shape[-3:]
        rows, frames = len(latents), latents.shape[1] if latents.ndim == 5 else None
        patches = patchify(latents.reshape(-1, height, width, channels).astype(self.dtype), config.patch)
        x = constrain(self.patch(patches.reshape(rows, -1, patches.shape[-1])), "B T D")
        c = self.time(sinusoid(timestep, config.waves).astype(self.dtype))
        text = self.text_down(jax.nn.gelu(self.text_up(conditions.text.astype(self.dtype)), approximate=True))
        turns = self.turns(rows, frames or 1, height // config.patch, width // config.patch)
        condition = WanCondition(self.modulation(jax.nn.silu(c)), text, turns)
        return x, DenoiserStep(Bidirectional.whole_rows(*x.shape[:2]), condition, c, (height, width), frames)

    def end(self, streams: Float[Array, "B T D"], step: DenoiserStep) -> Float[Array, "B *F H W C"]:
        config, (height, width), rows = self.config, step.size, len(streams)
        shift, scale = jnp.unstack(step.c[:, None] + self.table[...].astype(step.c.dtype), axis=1)
        y = self.out(modulate(streams, shift, scale, config.norm_eps))
        y = y.astype(sums_in(y.dtype)).reshape(-1, height * width // config.patch**2, y.shape[-1])
        frames = () if step.frames is None else (step.frames,)
        return unpatchify(y, height, width, config.patch).reshape(rows, *frames, height, width, config.channels)

    def turns(self, batch: int, frames: int, rows: int, columns: int) -> tuple[Array, Array]:
        """Computes cosines and sines [batch T P] of the positions: the frame, row and column of each patch."""
        at = np.stack(np.meshgrid(*map(np.arange, (frames, rows, columns)), indexing="ij"), -1).reshape(-1, 3)
        cos, sin = axial_turns(at, self.config.axes)
        return jnp.broadcast_to(cos, (batch, *cos.shape)), jnp.broadcast_to(sin, (batch, *sin.shape))
