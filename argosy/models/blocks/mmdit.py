"""Parts of denoisers with joint attention of image and text (`models.diffusion.mmdit`).

RoPE rotates interleaved pairs of features by cosines and sines [B T pairs], which the model passes to its layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.attention.attend import HEADS, Attend
from argosy.models.parts.attention.rope import turn_neighbors
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import MLP
from argosy.models.parts.modulation import modulate, sinusoid
from argosy.models.parts.norm import RMSNorm
from argosy.ops.attention import Score
from argosy.ops.precision import sums_in

LEGEND = (
    ("I", "patch"), ("W", "waves"), ("E", "embedder"), ("G", "modulation"), ("M", "modulated"), ("S", "text"), ("O", "pooled"),
    ("Q", "time_vector"), ("U", "classes"), ("R", "residual"),
)
# The letter of the input axis of each embedder, by the name of the condition.
READS = {"time": "W", "guidance": "W", "pooled": "O"}


class JointCondition(NamedTuple):
    """The condition of every layer.

    c: the embedding of the time step and the pooled text.
    turns: the cosines and sines of the positions of text, then image. None: the model has no rotary positions.
    """

    c: Float[Array, "B D"]
    turns: tuple[Float[Array, "B T P"], Float[Array, "B T P"]] | None = None


class MLPEmbedder(nnx.Module):
    """The two-layer embedder down(silu(up(x))) of a sinusoid or a pooled text.

    Args:
        letter: the letter of the input axis.
        out: the letter of the output axis.
    """

    def __init__(self, dims: dict[str, int], letter: str, out: str = "D", *, bias: bool = True):
        self.up = Einsum(f"B{letter},{letter}E->BE", dims, bias=bias, scale=0.02, legend=LEGEND)
        self.down = Einsum(f"BE,E{out}->B{out}", dims, bias=bias, scale=0.02, legend=LEGEND)

    def __call__(self, x: Float[Array, "B W"]) -> Float[Array, "B _"]:
        return self.down(jax.nn.silu(self.up(x)))


class VectorEmbedder(nnx.Module):
    """Embeds the time step, the pooled text and, if `guided`, the guidance scale in one vector."""

    def __init__(self, config: Any, guided: bool):
        self.waves = config.waves
        self.time, self.pooled = (MLPEmbedder(config.dims, READS[name]) for name in ("time", "pooled"))
        self.guidance = MLPEmbedder(config.dims, READS["guidance"]) if guided else None

    def __call__(self, timestep: Float[Array, "B"], pooled: Float[Array, "B O"], guidance: Any, dtype: Any) -> Float[Array, "B D"]:
        c = self.time(sinusoid(timestep, self.waves).astype(dtype)) + self.pooled(pooled.astype(dtype))
        if self.guidance is None:
            return c
        if guidance is None:
            raise ValueError("this model reads the scale of guidance")
        # Like the time step, the guidance scale is multiplied by 1000.
        return c + self.guidance(sinusoid(1000 * guidance, self.waves).astype(dtype))


class JointStream(nnx.Module):
    """The weights of one stream, image or text, in a layer.

    Args:
        parts: the number of modulation vectors: 6 for two sublayers, 9 with a second attention, 2 for a stream that ends in this layer.
        norms: whether queries and keys are normalized.
        mlp: whether the stream has a feed-forward layer and an output projection of attention.
    """

    def __init__(self, dims: dict[str, int], parts: int, *, norms: bool, mlp: bool = True):
        self.modulation = Einsum("BD,DGM->BGM", dims | {"G": parts}, bias=True, scale=0.0, legend=LEGEND)
        self.attn = Projections(dims, norms=norms, out=mlp)
        self.mlp = MLP(dims, "gelu_tanh") if mlp else None

    def modulated(self, c: Float[Array, "B D"]) -> list[Float[Array, "B D"]]:
        """Computes the modulation vectors (shifts, scales and gates) from the condition."""
        return list(jnp.unstack(self.modulation(jax.nn.silu(c)), axis=1))


class Projections(nnx.Module):
    """The projections of a stream to queries, keys and values, and the output projection of attention.

    Args:
        norms: whether queries and keys are normalized.
        out: whether there is an output projection.
        eps: the epsilon of the norms.
    """

    def __init__(self, dims: dict[str, int], *, norms: bool, out: bool = True, bias: bool = True, eps: float = 1e-6):
        self.q = Einsum("BTD,DNH->BTNH", dims, bias=bias)
        self.k = Einsum("BTD,DKH->BTKH", dims, bias=bias)
        self.v = Einsum("BTD,DKH->BTKH", dims, bias=bias)
        self.o = Einsum("BTNH,NHD->BTD", dims, bias=bias) if out else None
        norm: Callable[[], RMSNorm] = partial(RMSNorm, dims["H"], eps, letters="H")
        self.q_norm, self.k_norm = (norm(), norm()) if norms else (None, None)

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        q, k = self.q(x), self.k(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, self.v(x)


def joint_attention(
    streams: list[tuple[Array, Array, Array]], attend: Attend, turns: tuple[Array, Array] | None = None
) -> Float[Array, "B T N H"]:
    """Computes attention over the concatenated tokens of all streams.

    Args:
        streams: the queries, keys and values of each stream.
        turns: the cosines and sines of the positions. None: no rotary positions.
    """
    q, k, v = (jnp.concatenate([stream[i] for stream in streams], 1) for i in range(3))
    if turns is not None:
        q, k = turn_features(q, turns), turn_features(k, turns)
    return attend(q, {"k": k, "v": v}, None, HEADS, score=Score(q.shape[-1] ** -0.5))[0]


def turn_features(x: Float[Array, "B T N H"], turns: tuple[Array, Array]) -> Float[Array, "B T N H"]:
    """Applies RoPE: rotates each pair of neighboring features by its angle."""
    cos, sin = (t[:, :, None].astype(sums_in(x.dtype)) for t in turns)
    return turn_neighbors(x, cos, sin).astype(x.dtype)


def axial_turns(positions: np.ndarray, axes: tuple[int, ...], base: float = 1e4) -> tuple[np.ndarray, np.ndarray]:
    """Computes cosines and sines [T pairs] of positions [T axes]. They are computed in float64 and returned in float32.

    Args:
        axes: the number of features of a head that each axis rotates.
        base: the rope base of every axis.
    """
    angles = [positions[:, i, None] * base ** -(np.arange(0, n, 2) / n) for i, n in enumerate(axes)]
    angle = np.concatenate(angles, 1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class FinalLayer(nnx.Module):
    """The final adaLN norm, shifted and scaled by the condition, and the projection to patches."""

    def __init__(self, dims: dict[str, int], *, bias: bool = True):
        self.shift = Einsum("BD,DM->BM", dims, bias=bias, scale=0.0, legend=LEGEND)
        self.scale = Einsum("BD,DM->BM", dims, bias=bias, scale=0.0, legend=LEGEND)
        self.out = Einsum("BTD,DI->BTI", dims, bias=bias, scale=0.0, legend=LEGEND)

    def __call__(self, x: Float[Array, "B T D"], c: Float[Array, "B D"]) -> Float[Array, "B T I"]:
        c = jax.nn.silu(c)
        return self.out(modulate(x, self.shift(c), self.scale(c)))
