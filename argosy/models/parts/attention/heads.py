"""Multi-head attention. Families choose biases, norms on queries and keys, soft caps and sinks, and for each layer a window, rotary
positions and a temperature.

    y = softmax(score(rope(norm(q)), rope(norm(k)))) v        q = W_q x, k = W_k x, v = W_v x

Grouped queries: Ainslie et al. 2023 (arXiv:2305.13245). Norms on queries and keys: Dehghani et al. 2023 (arXiv:2302.05442).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.models.parts.attention.attend import HEADS, Attend
from argosy.models.parts.attention.cache import Cache, Spec
from argosy.models.parts.attention.rope import Turns, angles, apply_rope
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import rms_normalize
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.models.settings import Reach
from argosy.ops.attention import Score
from argosy.ops.hadamard import hadamard_transform
from argosy.ops.precision import sums_in, wide


class Attention(nnx.Module):
    """Attention of one layer.

    Args:
        dims: sizes of D, N, K and H.
        layers: the number of layers of the model. The more layers, the smaller the output projection is initialized, so that the
            residual stream keeps its variance.
        scale: the factor on scores. Default: 1/sqrt(H).
        bias: whether queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
        norms: builds the norm of queries or of keys from their number of heads. None: no norms.
        cap: the soft cap on scores, as in `Score`.
        sinks: whether each head has a learned sink, as in `Score`.

    rotates_keys: whether queries and keys are rotated by a Hadamard matrix after RoPE (`parts.rotations`).
    rotates_heads: whether the input of `o` is rotated across heads.
    """

    marks = ("qkv", "attention", "attention_out")
    rotates_keys = rotates_heads = False

    def __init__(
        self,
        dims: dict[str, int],
        layers: int,
        *,
        scale: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        norms: Callable[[int], nnx.Module] | None = None,
        cap: float | None = None,
        sinks: bool = False,
    ):
        N, K, H = dims["N"], dims["K"], dims["H"]
        self.scale, self.cap, self.kv_shape = H**-0.5 if scale is None else scale, cap, (K, H)
        self.q = Einsum("BTD,DNH->BTNH", dims, bias=bias)
        self.k = Einsum("BTD,DKH->BTKH", dims, bias=bias)
        self.v = Einsum("BTD,DKH->BTKH", dims, bias=bias)
        self.o = Einsum("BTNH,NHD->BTD", dims, bias=out_bias, scale=(N * H * 2 * layers) ** -0.5)
        self.q_norm: Any = norms(N) if norms else None
        self.k_norm: Any = norms(K) if norms else None
        self.sinks = weight((N,), Meaning("N"), Draw("normal", 1.0)) if sinks else None

    def holds(self, each: Reach) -> Spec:
        letters = (("k", "K H"), ("v", "K H"))
        return Spec(token=(("k", self.kv_shape), ("v", self.kv_shape)), span=each.window, chunked=each.chunked, letters=letters)

    def turns(self, each: Reach) -> Turns:
        return () if each.rope is None else ((each.rope, each.rope.rotated_size(self.kv_shape[1])),)

    def __call__(
        self, x: Float[Array, "B T D"], each: Reach, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q, k = self.q(x), self.k(x)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = scale_queries(rotate_heads(q, each, attend), each, attend), rotate_heads(k, each, attend)
        if self.rotates_keys:
            q, k = hadamard_transform(q), hadamard_transform(k)
        score = Score(self.scale, each.window, self.cap, None if self.sinks is None else self.sinks[...], each.chunked)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, self.v(x)))
        y, cache = attend(q, {"k": k, "v": v}, cache, HEADS, score=score)
        y = checkpoint_name(y, "attention")
        return checkpoint_name(self.o(hadamard_transform(y, -2) if self.rotates_heads else y), "attention_out"), cache


def rotate_heads(x: Float[Array, "B T N H"], each: Reach, attend: Attend) -> Float[Array, "B T N H"]:
    """Applies RoPE to queries or keys, then the layer's weightless RMS norm. Each is skipped if the layer's settings lack it."""
    if each.rope is not None:
        size = each.rope.rotated_size(x.shape[-1])
        shared = (getattr(attend, "angles", None) or {}).get(each.rope.key(size))
        x = apply_rope(x, each.rope, shared or angles(attend.positions, each.rope, size))
    return x if each.unit is None else rms_normalize(wide(x), each.unit).astype(x.dtype)


def scale_queries(q: Float[Array, "B T N H"], each: Reach, attend: Attend) -> Float[Array, "B T N H"]:
    """Scales queries by a factor that grows with their position (`Temper`, for Llama 4's long contexts)."""
    if each.temper is None:
        return q
    steps = (attend.positions + 1) // each.temper.floor
    growth = 1 + each.temper.scale * jnp.log1p(steps.astype(sums_in(q.dtype)))
    return (wide(q) * growth[:, :, None, None]).astype(q.dtype)
