"""The module of Z-Image (`models.diffusion.z_image` has the equations)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.blocks.layered import DenoiserStep, LayeredDenoiser
from argosy.models.blocks.mmdit import LEGEND, MLPEmbedder, Projections, axial_turns, joint_attention
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import GLU
from argosy.models.parts.modulation import layer_norm, sinusoid
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.patches import patchify, unpatchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.models.settings import Reach
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain

# The epsilon of the norms of queries and keys.
HEAD_EPS = 1e-5


class TimeCondition(NamedTuple):
    """The condition of every layer.

    c: the embedding of the time step.
    turns: the cosines and sines of the positions.
    """

    c: Float[Array, "B Q"]
    turns: tuple[Float[Array, "B T P"], Float[Array, "B T P"]]


class ZImageBlock(nnx.Module):
    """A layer with norms before and after attention and the feed-forward layer.

    Args:
        modulated: whether the time step scales and gates the layer. Not so in layers over texts.
    """

    def __init__(self, config: Any, modulated: bool):
        d, norm = config.dims, partial(RMSNorm, config.width, config.norm_eps)
        self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm = (norm() for _ in range(4))
        self.attn = Projections(d, norms=config.qk_norm, bias=False, eps=HEAD_EPS)
        self.mlp = GLU(d)
        gates = Einsum("BQ,QGM->BGM", d | {"G": 4}, bias=True, scale=0.0, legend=LEGEND) if modulated else None
        self.modulation = gates

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: Float[Array, "B T D"], each: Reach, cache: Any, attend: Attend, condition: TimeCondition) -> Any:
        scale = gate = mlp_scale = mlp_gate = jnp.ones((), x.dtype)
        if self.modulation is not None:
            scale, gate, mlp_scale, mlp_gate = jnp.unstack(self.modulation(condition.c)[:, :, None], axis=1)
            scale, mlp_scale = 1 + scale, 1 + mlp_scale
            gate, mlp_gate = jnp.tanh(gate), jnp.tanh(mlp_gate)
        y = joint_attention([self.attn(self.attn_norm(x) * scale)], attend, condition.turns)
        x = x + gate * self.attn_post_norm(self.attn.o(y))  # pyright: ignore[reportOptionalCall]
        return x + mlp_gate * self.mlp_post_norm(self.mlp(self.mlp_norm(x) * mlp_scale)), cache, {}


class ZImage(LayeredDenoiser):
    """Maps noisy latents, time steps and texts to velocities."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.time = MLPEmbedder(d, "W", "Q")
        self.text_norm = RMSNorm(config.text_width, config.norm_eps, letters="S", legend=LEGEND)
        self.text_embed = Einsum("BTS,SD->BTD", d, bias=True, legend=LEGEND)
        pad = partial(weight, (config.width,), Meaning("D"), Draw("normal", 0.02))
        self.image_pad, self.text_pad = pad(), pad()

        def stack(layers: int, modulated: bool) -> Stack:
            return Stack([Layer("block", Reach())] * layers, lambda kind: ZImageBlock(config, modulated), run=run)

        self.image_layers, self.text_layers = stack(config.refiner_layers, True), stack(config.refiner_layers, False)
        self.layers = stack(config.layers, True)
        self.final_scale = Einsum("BQ,QD->BD", d, bias=True, scale=0.0, legend=LEGEND)
        self.final_out = Einsum("BTD,DI->BTI", d, bias=True, scale=0.0, legend=LEGEND)

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        config, (height, width), rows = self.config, latents.shape[1:3], latents.shape[0]
        # Z-Image counts time from noise (0) to images (1), and predicts image - noise.
        waves = sinusoid((1000 - timestep) * (config.time_scale / 1000), config.waves)
        c = self.time(waves.astype(self.dtype))
        x = constrain(self.patch(patchify(latents.astype(self.dtype), config.patch)), "B T D")
        patches, count = x.shape[1], config.filled_up(x.shape[1])
        filling = self.image_pad[...].astype(x.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(filling, (rows, count - patches, config.width))], 1)
        text, words = self.texts(conditions)
        lengths = config.filled_up(words)
        live = (jnp.arange(text.shape[1]) < lengths[:, None]).astype(jnp.int32)
        turns = self.turns(lengths, text.shape[1], height // config.patch, width // config.patch)
        of_image, of_text = ([t[:, :count] for t in turns], [t[:, count:] for t in turns])
        image_segments = jnp.ones((rows, count), jnp.int32)
        x, _, _ = self.image_layers(x, None, Bidirectional(image_segments), TimeCondition(c, (of_image[0], of_image[1])))
        text, _, _ = self.text_layers(text, None, Bidirectional(live), TimeCondition(c, (of_text[0], of_text[1])))
        attend = Bidirectional(jnp.concatenate([image_segments, live], 1))
        return jnp.concatenate([x, text], 1), DenoiserStep(attend, TimeCondition(c, turns), c, (height, width))

    def end(self, streams: Float[Array, "B T D"], step: DenoiserStep) -> Float[Array, "B H W C"]:
        (height, width), patch = step.size, self.config.patch
        y = layer_norm(streams[:, : height * width // patch**2]) * (1 + self.final_scale(jax.nn.silu(step.c))[:, None])
        y = self.final_out(y)
        return -unpatchify(y.astype(sums_in(y.dtype)), height, width, patch)

    def texts(self, conditions: Conditions) -> tuple[Float[Array, "B T D"], Int[Array, "B"]]:
        """Computes text tokens, padded with a learned token. Also returns the number of tokens of each text without padding."""
        states = conditions.text.astype(self.dtype)
        text = self.text_embed(self.text_norm(states))
        mask = conditions.text_mask
        mask = jnp.ones(states.shape[:2], jnp.int32) if mask is None else mask
        more = ((0, 0), (0, self.config.filled_up(states.shape[1]) - states.shape[1]))
        text, mask = jnp.pad(text, (*more, (0, 0))), jnp.pad(mask, more)
        return jnp.where(mask[..., None] > 0, text, self.text_pad[...].astype(text.dtype)), jnp.sum(mask, 1)

    def turns(
        self, lengths: Int[Array, "B"], text: int, rows: int, columns: int
    ) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
        """Computes the cosines and sines of the positions of image and text. On the first axis, image tokens come right after their
        text, so their positions differ between rows.

        Args:
            lengths: the padded length of each text.
            text: the padded length of the longest text.
            rows, columns: the number of patches of the image.
        """
        config, patches = self.config, rows * columns
        grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 2)
        grid = np.pad(grid, ((0, config.filled_up(patches) - patches + text), (0, 0)))
        is_patch, words = np.arange(len(grid)) < patches, np.arange(len(grid)) - config.filled_up(patches) + 1
        at = jnp.where(is_patch, lengths[:, None] + 1, np.maximum(words, 0))
        first = axial_turns(np.arange(text + 2)[:, None], config.axes[:1], config.rope_base)
        others = axial_turns(grid, config.axes[1:], config.rope_base)
        full = (lengths.shape[0], *others[0].shape)
        cos, sin = (
            jnp.concatenate([jnp.asarray(a)[at], jnp.broadcast_to(b, full)], -1) for a, b in zip(first, others, strict=True)
        )
        return cos, sin
