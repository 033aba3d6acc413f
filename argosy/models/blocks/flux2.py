"""The module of Flux.2 (`models.diffusion.flux2` has the equations)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, SingleStreamDenoiser
from argosy.models.blocks.mmdit import LEGEND, FinalLayer, MLPEmbedder, Projections, axial_turns, joint_attention
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import GLU
from argosy.models.parts.modulation import modulate, sinusoid
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.settings import Reach
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


class SharedCondition(NamedTuple):
    """The condition of every layer.

    modulations: shift, scale and gate vectors by stream. For the first layers: of image and of text, [B 6 D] each. For the last
        layers: of both together, [B 3 D].
    turns: the cosines and sines of the positions of text, then image.
    """

    modulations: dict[str, Float[Array, "B G D"]]
    turns: tuple[Float[Array, "B T P"], Float[Array, "B T P"]]


class StreamWeights(nnx.Module):
    """The weights of one stream, image or text, in a layer."""

    def __init__(self, dims: dict[str, int]):
        self.attn = Projections(dims, norms=True, bias=False)
        self.mlp = GLU(dims)


class Flux2Block(nnx.Module):
    """A double-stream layer: image and text have separate weights and attend jointly. The streams are {image, text}."""

    def __init__(self, config: Any):
        self.image, self.text = StreamWeights(config.dims), StreamWeights(config.dims)

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: SharedCondition) -> Any:
        streams: dict[str, Any] = {"text": self.text, "image": self.image}
        m = {name: jnp.unstack(condition.modulations[name], axis=1) for name in streams}
        read = [stream.attn(modulate(x[name], m[name][0], m[name][1])) for name, stream in streams.items()]
        y = joint_attention(read, attend, condition.turns)
        cut = x["text"].shape[1]
        apart = {"text": y[:, :cut], "image": y[:, cut:]}
        out = {}
        for name, stream in streams.items():
            h = x[name] + m[name][2][:, None] * stream.attn.o(apart[name])
            out[name] = h + m[name][5][:, None] * stream.mlp(modulate(h, m[name][3], m[name][4]))
        return out, cache, {}


class Flux2SingleBlock(nnx.Module):
    """A single-stream layer over text and image tokens. Attention and the feed-forward layer are parallel."""

    def __init__(self, config: Any):
        d = config.dims
        self.attn = Projections(d, norms=True, bias=False)
        self.gate, self.up = Einsum("BTD,DF->BTF", d), Einsum("BTD,DF->BTF", d)
        self.down = Einsum("BTF,FD->BTD", d)

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: Float[Array, "B T D"], each: Reach, cache: Any, attend: Attend, condition: SharedCondition) -> Any:
        shift, scale, gate = jnp.unstack(condition.modulations["both"], axis=1)
        h = modulate(x, shift, scale)
        y = self.attn.o(joint_attention([self.attn(h)], attend, condition.turns))  # pyright: ignore[reportOptionalCall]
        return x + gate[:, None] * (y + self.down(jax.nn.silu(self.gate(h)) * self.up(h))), cache, {}


class Flux2(SingleStreamDenoiser):
    """Maps noisy latents, time steps and texts to velocities."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, legend=LEGEND)
        self.text_embed = Einsum("BTS,SD->BTD", d, legend=LEGEND)
        self.time = MLPEmbedder(d, "W", bias=False)
        self.guidance = MLPEmbedder(d, "W", bias=False) if config.guided else None

        def modulation(parts: int) -> Einsum:
            return Einsum("BD,DGM->BGM", d | {"G": parts}, scale=0.0, legend=LEGEND)

        self.image_modulation, self.text_modulation, self.single_modulation = (modulation(parts) for parts in (6, 6, 3))
        self.layers = Stack([Layer("block", Reach())] * config.layers, lambda kind: Flux2Block(config), run=run)
        self.single_layers = Stack([Layer("block", Reach())] * config.single_layers, lambda kind: Flux2SingleBlock(config), run=run)
        self.final = FinalLayer(d, bias=False)

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        config, (rows, height, width) = self.config, latents.shape[:3]
        x = constrain(self.patch(latents.astype(self.dtype).reshape(rows, height * width, config.channels)), "B T D")
        text = self.text_embed(conditions.text.astype(self.dtype))
        c = self.time(sinusoid(timestep, config.waves).astype(self.dtype))
        if self.guidance is not None:
            if conditions.guidance is None:
                raise ValueError("this model reads the scale of guidance")
            c = c + self.guidance(sinusoid(1000 * conditions.guidance, config.waves).astype(self.dtype))
        activated = jax.nn.silu(c)
        modulations = {"image": self.image_modulation(activated), "text": self.text_modulation(activated)}
        modulations["both"] = self.single_modulation(activated)
        condition = SharedCondition(modulations, self.turns(rows, text.shape[1], height, width))
        attend = Bidirectional.whole_rows(rows, text.shape[1] + x.shape[1])
        return {"image": x, "text": text}, DenoiserStep(attend, condition, c, (height, width))

    def end(self, streams: dict[str, Array], step: DenoiserStep) -> Float[Array, "B H W C"]:
        y = self.final(streams["image"], step.c)
        return y.astype(sums_in(y.dtype)).reshape(-1, *step.size, self.config.channels)

    def turns(self, rows: int, text: int, height: int, width: int) -> tuple[Array, Array]:
        """Computes cosines and sines [rows T P] of the positions. A text token has its index on the last axis, an image token its row
        and column.

        Args:
            rows: the batch size.
            text: the number of text tokens.
            height, width: the size of the latents.
        """
        at = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1).reshape(-1, 2)
        words = np.pad(np.arange(text)[:, None], ((0, 0), (3, 0)))
        cos, sin = axial_turns(np.concatenate([words, np.pad(at, ((0, 0), (1, 1)))]), self.config.axes, self.config.rope_base)
        return jnp.broadcast_to(cos, (rows, *cos.shape)), jnp.broadcast_to(sin, (rows, *sin.shape))
