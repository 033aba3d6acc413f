"""Multi-head latent attention (MLA): only one short vector and one rotary key per token are cached, shared by all heads.

    c = norm(W_dkv x),  r = rope(W_kr x)                 cached: c [R] and r [P] in one array, nothing else
    q = W_q x, or W_uq norm(W_dq x)                      for each head: a plain part [H] and a rotary part [P]
    k = [W_uk c ; r],  v = W_uv c                        expanded: keys and values of each head, best for training
    [W_uk' q ; q_r] against [c ; r], then W_uv           absorbed: one key head in the space of the cache, best for decoding

Both forms compute the same function. With an indexer (`parts.attention.indexer`), a query attends only to the tokens that the indexer
selects, and the indexer's keys are cached too. DeepSeek-V2 (arXiv:2405.04434, section 2.1).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Cache, Spec
from argosy.models.parts.attention.heads import Reach, rotate_heads
from argosy.models.parts.attention.indexer import Indexer, IndexQuery
from argosy.models.parts.attention.rope import Turns
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import RMSNorm
from argosy.models.settings import Index
from argosy.ops.attention import Score, See
from argosy.ops.narrow import blocks_of

# The epsilon of the norms over latents, whatever epsilon the model's other norms have.
LATENT_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Latent attention of one layer.

    Args:
        dims: sizes of D, N, R, H, P, C = H + P and U. If queries are projected from a latent, also of Q. If there is an indexer, also
            of I and J.
        layers: the number of layers of the model. The more layers, the smaller the output projection is initialized, so that the
            residual stream keeps its variance.
        scale: the factor on scores.
        bias: whether the projections to latents and the output projection have biases.
        index: the settings of an indexer, which reads the latent of queries. None: queries attend to all tokens.
    """

    marks = ("qkv", "attention", "attention_out")

    def __init__(
        self, dims: dict[str, int], layers: int, *, scale: float, bias: bool = False, index: Index | None = None
    ):
        self.scale, self.plain = scale, dims["H"]
        self.rank, self.rope_size = dims["R"], dims["P"]
        self.kept = (("latent", (dims["R"] + dims["P"],)),)
        self.kept += () if index is None else (("index", (dims["J"],)),)
        if "Q" in dims:
            self.q_down = Einsum("BTD,DQ->BTQ", dims, bias=bias)
            self.q_norm = RMSNorm(dims["Q"], LATENT_EPS, letters="Q")
            self.q_up = Einsum("BTQ,QNC->BTNC", dims)
        else:
            self.q = Einsum("BTD,DNC->BTNC", dims)
        self.kv_down = Einsum("BTD,DR->BTR", dims, bias=bias)
        self.kv_norm = RMSNorm(dims["R"], LATENT_EPS, letters="R")
        self.k_rope = Einsum("BTD,DP->BTP", dims, bias=bias)
        self.k_up = Einsum("BTR,RNH->BTNH", dims, several=True)
        self.v_up = Einsum("BTR,RNU->BTNU", dims, several=True)
        self.o = Einsum("BTNU,NUD->BTD", dims, bias=bias, scale=(dims["N"] * dims["U"] * 2 * layers) ** -0.5)
        self.index: Any = None if index is None else Indexer(dims, index.topk)

    def holds(self, each: Reach) -> Spec:
        # The latent is normalized and the rotary key is not, so each has its own scales. The indexer's keys are not quantized: a key
        # that moves by half a step may select another token, and the error of that is not bounded by the rounding.
        scales = (("latent", blocks_of(self.rank, self.rope_size)), ("index", 0))
        return Spec(token=self.kept, span=each.window, scales=scales)

    def turns(self, each: Reach) -> Turns:
        return () if each.rope is None else ((each.rope, self.rope_size),)

    def queries(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T N C"], Array]:
        """Computes the queries of each head. Also returns what they were projected from: the latent of queries, or x."""
        if not hasattr(self, "q_up"):
            return self.q(x), x
        latent = self.q_norm(self.q_down(x))
        return self.q_up(latent), latent

    def __call__(
        self, x: Float[Array, "B T D"], each: Reach, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q, source = self.queries(x)
        q = jnp.concatenate([q[..., : self.plain], rotate_heads(q[..., self.plain :], each, attend)], -1)
        rope = rotate_heads(self.k_rope(x)[:, :, None], each, attend)[:, :, 0]
        # The latent is kept instead of the heads' keys and values, which are longer and computed from the latent.
        q = checkpoint_name(q, "qkv")
        entries = {"latent": checkpoint_name(jnp.concatenate([self.kv_norm(self.kv_down(x)), rope], -1), "qkv")}
        query = None
        if self.index is not None:
            query, entries["index"] = self.index(x, source, each, attend)
        y, cache = attend(q, entries, cache, Latent(self, query), score=Score(self.scale, each.window))
        return checkpoint_name(self.o(checkpoint_name(y, "attention")), "attention_out"), cache


class Latent:
    """An `attend.Read` for the cache of latent attention. `query`: the indexer's queries of these tokens; None without an indexer."""

    def __init__(self, layer: LatentAttention, query: IndexQuery | None = None):
        self.layer, self.query = layer, query

    def expand(self, entries: Cache) -> tuple[Array, Array]:
        latent, rope = jnp.split(entries["latent"], [self.layer.rank], -1)
        k = self.layer.k_up(latent)
        shared = jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], rope.shape[-1]))
        return jnp.concatenate([k, shared], -1), self.layer.v_up(latent)

    def absorb(self, q: Array, entries: Cache) -> tuple[Array, Array, Array]:
        H = self.layer.plain
        k = entries["latent"][:, :, None]
        q = jnp.concatenate([self.layer.k_up.via("BTNH,RNH->BTNR", q[..., :H]), q[..., H:]], -1)
        return q, k, k[..., : self.layer.rank]

    def release(self, y: Array) -> Array:
        return self.layer.v_up.via("BTNR,RNU->BTNU", y)

    def narrow(self, entries: Cache, see: See, window: int | None) -> See:
        return see if self.query is None else self.layer.index.pick(self.query, entries["index"], see, window)

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        R, N, H, U, P = self._sizes()
        expanded = S * N * R * (H + U) + T * S * N * (H + P + U)
        absorbed = T * N * R * (H + U) + T * S * N * (R + P + R)
        return expanded, absorbed

    @property
    def narrows(self) -> bool:
        return self.query is not None

    def of_rows(self, cut: Callable[[Array], Array]) -> "Latent":
        return self if self.query is None else Latent(self.layer, IndexQuery(*map(cut, self.query)))

    def _sizes(self) -> tuple[int, int, int, int, int]:
        sizes: dict[str, Any] = self.layer.k_up.sizes | self.layer.v_up.sizes | self.layer.k_rope.sizes
        return sizes["R"], sizes["N"], sizes["H"], sizes["U"], sizes["P"]
