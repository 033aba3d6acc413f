"""The module of DiT and SiT (`models.diffusion.dit` has the equations)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, LayeredDenoiser
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.attention.heads import Attention
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import MLP
from argosy.models.parts.modulation import modulate, sinusoid
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.patches import patchify, sincos_2d, unpatchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.settings import Reach
from argosy.parallel.scope import constrain

LEGEND = (
    ("I", "patch"), ("O", "patch_out"), ("W", "waves"), ("E", "embedder"), ("Y", "classes"), ("G", "modulation"), ("M", "modulated")
)

# Waves of time steps are so many times as long in models that read intervals: the shortest of 628 time steps.
SLOWER = 100


class Embedder(nnx.Module):
    """Sines of the time step and a class to one vector."""

    def __init__(self, config: Any):
        d = config.dims
        self.up = Einsum("BW,WE->BE", d, bias=True, scale=0.02, legend=LEGEND)
        self.down = Einsum("BE,ED->BD", d, bias=True, scale=0.02, legend=LEGEND)
        self.classes = Einsum("BY,YD->BD", d, scale=0.02, legend=LEGEND)
        self.interval_up = Einsum("BW,WE->BE", d, bias=True, scale=0.02, legend=LEGEND) if config.intervals else None
        self.interval_down = Einsum("BE,ED->BD", d, bias=True, scale=0.02, legend=LEGEND) if config.intervals else None

    def __call__(self, waves: Float[Array, "B W"], labels: Any, interval: Any = None) -> Float[Array, "B D"]:
        """interval: [B W] sines of the interval, where the model reads one."""
        time = self.down(jax.nn.silu(self.up(waves)))
        if self.interval_up is not None and self.interval_down is not None:
            time = time + self.interval_down(jax.nn.silu(self.interval_up(interval)))
        return time + self.classes.take(labels).astype(time.dtype)


class DiTBlock(nnx.Module):
    """Attention, then the feed-forward layer, both shifted, scaled and gated.

    Args:
        embeds: whether the layer has an embedder of its own, in place of the model's.
    """

    def __init__(self, config: Any, embeds: bool):
        d = config.dims
        self.norm_eps = config.norm_eps
        self.embedder = Embedder(config) if embeds else None
        self.modulation = Einsum("BD,DGM->BGM", d, bias=True, scale=0.0, legend=LEGEND)
        norms = partial(RMSNorm, d["H"], letters="H") if config.qk_norm else None
        self.attn = Attention(d, config.layers, bias=True, out_bias=True, norms=norms and (lambda heads: norms()))
        self.mlp = MLP(d, "gelu_tanh")

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: Array, each: Reach, cache: Any, attend: Attend, condition: dict[str, Array]) -> Any:
        c = condition["c"] if self.embedder is None else self.embedder(condition["waves"], condition["labels"])
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.unstack(self.modulation(jax.nn.silu(c)), axis=1)
        y, _ = self.attn(modulate(x, shift, scale), each, None, attend)
        x = x + gate[:, None] * y
        y = self.mlp(modulate(x, mlp_shift, mlp_scale, self.norm_eps))
        return x + mlp_gate[:, None] * y, cache, {}


class DiT(LayeredDenoiser):
    """Noisy images, time steps and classes to predictions."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.embedder = Embedder(config)
        # The first layer reads the model's embedder, which the final layer reads too.
        apart = ["apart"] * (config.layers - 1) if config.layer_embedders else ["block"] * (config.layers - 1)
        plan = [Layer(kind, Reach()) for kind in ("block", *apart)]
        self.layers = Stack(plan, lambda kind: DiTBlock(config, kind == "apart"), run=run)
        self.final_modulation = Einsum("BD,DGM->BGM", d | {"G": 2}, bias=True, scale=0.0, legend=LEGEND)
        self.head = Einsum("BTD,DO->BTO", d, bias=True, scale=0.0, legend=LEGEND)

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        config = self.config
        height, width = latents.shape[1:3]
        x = self.patch(patchify(latents.astype(self.dtype), config.patch))
        x = constrain(x + jnp.asarray(self.positions(height, width), x.dtype), "B T D")
        if config.intervals:
            # The derivative along time is trained on, and that of waves of one radian in a thousandth of the way is mostly noise.
            timestep = timestep / SLOWER
        waves = sinusoid(timestep, config.waves, shift=1.0).astype(self.dtype)
        interval = None
        if config.intervals:
            length = jnp.zeros_like(timestep) if conditions.interval is None else conditions.interval / SLOWER
            interval = sinusoid(length, config.waves, shift=1.0).astype(self.dtype)
        c = self.embedder(waves, conditions.labels, interval)
        condition = {"c": c} | ({"waves": waves, "labels": conditions.labels} if config.layer_embedders else {})
        attend = Bidirectional.whole_rows(*x.shape[:2])
        return x, DenoiserStep(attend, condition, c, (height, width))

    def end(self, streams: Float[Array, "B T D"], step: DenoiserStep) -> Float[Array, "B H W C"]:
        shift, scale = jnp.unstack(self.final_modulation(jax.nn.silu(step.c)), axis=1)
        y = self.head(modulate(streams, shift, scale)).astype(jnp.float32)
        return unpatchify(y, *step.size, self.config.patch)[..., : self.config.channels]

    def positions(self, height: int, width: int) -> np.ndarray:
        """The table of positions, scaled to that of the trained size."""
        base = self.config.size // self.config.patch
        counts = [n // self.config.patch for n in (height, width)]
        rows, columns = (np.arange(n) * (base / n) for n in counts)
        return sincos_2d(rows, columns, self.config.width)
