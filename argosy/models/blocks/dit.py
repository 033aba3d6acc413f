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

# Models that read intervals divide time steps by this factor before the sinusoid. The shortest wavelength is then 628 time steps.
SLOWER = 100


class Embedder(nnx.Module):
    """Embeds a time step's sinusoid and a class label in one vector."""

    def __init__(self, config: Any):
        d = config.dims
        self.up = Einsum("BW,WE->BE", d, bias=True, scale=0.02, legend=LEGEND)
        self.down = Einsum("BE,ED->BD", d, bias=True, scale=0.02, legend=LEGEND)
        self.classes = Einsum("BY,YD->BD", d, scale=0.02, legend=LEGEND)
        self.interval_up = Einsum("BW,WE->BE", d, bias=True, scale=0.02, legend=LEGEND) if config.intervals else None
        self.interval_down = Einsum("BE,ED->BD", d, bias=True, scale=0.02, legend=LEGEND) if config.intervals else None

    def __call__(self, waves: Float[Array, "B W"], labels: Any, interval: Any = None) -> Float[Array, "B D"]:
        """Computes the embedding, [B D].

        Args:
            waves: the sinusoid of the time step.
            labels: [B] classes.
            interval: [B W], the sinusoid of the interval. Only for models that read intervals.
        """
        time = self.down(jax.nn.silu(self.up(waves)))
        if self.interval_up is not None and self.interval_down is not None:
            time = time + self.interval_down(jax.nn.silu(self.interval_up(interval)))
        return time + self.classes.take(labels).astype(time.dtype)


class DiTBlock(nnx.Module):
    """Attention, then the feed-forward layer, both with adaLN (shift, scale and gate).

    Args:
        embeds: whether the layer has its own embedder instead of the model's.
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
    """Maps noisy images or latents, time steps and classes to predictions."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.embedder = Embedder(config)
        # The first layer and the final layer share the model's embedder.
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
            # Training uses the derivative with respect to time. Waves of one radian per time step would make that mostly noise.
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
        """The fixed position embeddings for latents of this size. Positions are scaled to the range of `config.size`."""
        base = self.config.size // self.config.patch
        counts = [n // self.config.patch for n in (height, width)]
        rows, columns = (np.arange(n) * (base / n) for n in counts)
        return sincos_2d(rows, columns, self.config.width)
