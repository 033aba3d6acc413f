"""The gated attention and the delta net of Qwen3-Next (`models.qwen3_next` has the equations)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.models.parts.attention.attend import HEADS, Attend
from argosy.models.parts.attention.cache import Cache, Spec
from argosy.models.parts.attention.heads import Attention, rotate_heads
from argosy.models.parts.attention.recurrence import Carry
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.models.settings import Reach
from argosy.ops import delta
from argosy.ops.attention import Score
from argosy.ops.conv import causal_conv
from argosy.ops.precision import sums_in, wide


class GatedAttention(Attention):
    """Attention whose output is multiplied elementwise by a gate (Qiu et al. 2025, arXiv:2505.06708)."""

    def __init__(self, dims: dict[str, int], layers: int, *, bias: bool, norms: Any):
        super().__init__(dims, layers, bias=bias, out_bias=bias, norms=norms)
        self.gate = Einsum("BTD,DNH->BTNH", dims, bias=bias)

    def __call__(
        self, x: Float[Array, "B T D"], each: Reach, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q = rotate_heads(self.q_norm(self.q(x)), each, attend)
        k = rotate_heads(self.k_norm(self.k(x)), each, attend)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, self.v(x)))
        y, cache = attend(q, {"k": k, "v": v}, cache, HEADS, score=Score(self.scale))
        y = checkpoint_name(y, "attention") * jax.nn.sigmoid(self.gate(x))
        return checkpoint_name(self.o(y), "attention_out"), cache


# Letters of a delta net: K key heads, G value heads for each, H and U the sizes of a key and a value.
LEGEND = (("K", "delta_heads"), ("G", "delta_group"), ("H", "delta_key"), ("U", "delta_value"))


class DeltaNet(nnx.Module):
    """A gated delta net (arXiv:2412.06464).

    Args:
        heads: the sizes of the delta net (`DeltaHeads`).
        width: the width D of the residual stream.
        layers: the number of layers of the model. The more layers, the smaller the output projection is initialized, so that the
            residual stream keeps its variance.
        eps: the epsilon of the norm of the delta rule's output.
    """

    called = "delta net"
    marks = ("qkv", "attention", "attention_out")

    def __init__(self, heads: Any, width: int, layers: int, eps: float):
        d = heads.dims | {"D": width}
        self.d = tuple(d.items())
        self.q, self.k = Einsum("BTD,DKH->BTKH", d, legend=LEGEND), Einsum("BTD,DKH->BTKH", d, legend=LEGEND)
        self.v, self.z = Einsum("BTD,DKGU->BTKGU", d, legend=LEGEND), Einsum("BTD,DKGU->BTKGU", d, legend=LEGEND)
        self.a, self.b = Einsum("BTD,DKG->BTKG", d, legend=LEGEND), Einsum("BTD,DKG->BTKG", d, legend=LEGEND)
        self.q_taps, self.k_taps, self.v_taps = (_taps(letters, d) for letters in ("KHW", "KHW", "KGUW"))
        # At each token the state decays by exp(A) softplus(dt). For A = 0 this is 0.05, in the middle of the paper's range 0.001 to
        # 0.1.
        self.a_log = weight((d["K"], d["G"]), Meaning("KG", legend=LEGEND), Draw("normal", 1.0))
        self.dt = weight((d["K"], d["G"]), Meaning("KG", legend=LEGEND), Draw("constant", -3.0))
        self.norm = RMSNorm(d["U"], eps, letters="U", legend=LEGEND)
        self.o = Einsum("BTKGU,KGUD->BTD", d, legend=LEGEND, scale=(d["K"] * d["G"] * d["U"] * 2 * layers) ** -0.5)

    def holds(self, each: Any) -> Spec:
        d = dict(self.d)
        K, G, H, U, back = d["K"], d["G"], d["H"], d["U"], d["W"] - 1
        inputs = ("q", (back, K, H)), ("k", (back, K, H)), ("v", (back, K, G, U))
        letters = ("q", "W delta_heads H"), ("k", "W delta_heads H"), ("v", "W delta_heads G U"), ("state", "delta_heads G H U")
        return Spec(row=(*inputs, ("state", (K, G, H, U))), letters=letters)

    def __call__(
        self, x: Float[Array, "B T D"], each: Any, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        a, b = (wide(project(x)) for project in (self.a, self.b))
        decay = -jnp.exp(self.a_log[...].astype(a.dtype)) * jax.nn.softplus(a + self.dt[...].astype(a.dtype))
        q, k, v = (checkpoint_name(project(x), "qkv") for project in (self.q, self.k, self.v))
        inputs = (q, k, v, decay, jax.nn.sigmoid(b))
        y, cache = attend.recur(partial(self.recurrence, each), inputs, cache)
        y = self.norm(checkpoint_name(y, "attention")) * jax.nn.silu(wide(self.z(x)))
        return checkpoint_name(self.o(y.astype(x.dtype)), "attention_out"), cache

    def recurrence(self, each: Any, inputs: tuple[Array, ...], carry: Carry) -> tuple[Float[Array, "B T K G U"], Cache]:
        """Applies the short convolutions, then the delta rule. Returns the output and the new states (`parts.attention.recurrence`)."""
        q, k, v, decay, write = inputs
        states, new = carry.state, {}
        if states is None:
            states = {name: jnp.zeros((q.shape[0], *shape), sums_in(q.dtype)) for name, shape in self.holds(each).row}

        def mixed(name: str, y: Array, taps: Any) -> Array:
            y, new[name] = causal_conv(y, taps[...], states[name], carry.starts, carry.live)
            return jax.nn.silu(y)

        q = unit(mixed("q", q, self.q_taps)) * dict(self.d)["H"] ** -0.5
        k, v = unit(mixed("k", k, self.k_taps)), mixed("v", v, self.v_taps)
        y, new["state"] = delta.delta_rule(q, k, v, decay, write, states["state"], carry.starts, carry.live)
        return y, new


def _taps(letters: str, dims: dict[str, int]) -> Any:
    """Describes the weight of a short convolution."""
    return weight(tuple(dims[a] for a in letters), Meaning(letters, legend=LEGEND), Draw("normal", dims["W"] ** -0.5))


def unit(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scales x to length 1 along the last axis, in at least float32. Zero stays zero."""
    x = wide(x)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
