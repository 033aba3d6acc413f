"""The indexer of sparse attention: a few small heads score all earlier tokens, and attention reads the tokens with the best scores.

    I_ts = sum over h of  w_th relu(q_th . k_s)        q and w of each indexer head, one key for all of them
    selected for query t: the `topk` tokens s with the largest I_ts; all tokens if there are fewer

No gradient reaches the indexer's weights (`SelectionWeight`), so training leaves the indexer as it is. DeepSeek trains it separately,
towards the weights of attention; that loss is not implemented here. Like a router, the indexer computes scores in float32 at least.
DeepSeek's kernels multiply queries and keys by a Hadamard matrix, then round them to FP8. The multiplication does not change products
and is left out, as is the rounding.

Attention still computes the scores of all tokens and drops those that are not selected. The result is the same, without a gain in
speed.

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.heads import Reach, rotate_heads
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import LayerNorm
from argosy.models.parts.weight import SelectionWeight
from argosy.ops.attention import See
from argosy.ops.precision import wide

# The most scores of single heads that exist at once: 64 MB in float32.
AT_ONCE = 1 << 24
# The epsilon of the norm over keys, whatever epsilon the model's other norms have.
KEY_EPS = 1e-6


class IndexQuery(NamedTuple):
    """The indexer's queries of the tokens of one call: for each indexer head, a query and the weight of that head."""

    q: Float[Array, "B T I J"]
    weights: Float[Array, "B T I"]


class Indexer(nnx.Module):
    """The indexer of one layer.

    Args:
        dims: sizes of D, Q, I, J and P. P is the number of features of a head that have rotary positions.
        topk: how many tokens each query selects.
    """

    def __init__(self, dims: dict[str, int], topk: int):
        self.topk, self.turns = topk, dims["P"]
        self.scale = (dims["I"] * dims["J"]) ** -0.5
        self.q = Einsum("BTQ,QIJ->BTIJ", dims, kind=SelectionWeight)
        self.k = Einsum("BTD,DJ->BTJ", dims, kind=SelectionWeight)
        self.k_norm = LayerNorm(dims["J"], KEY_EPS, "J", SelectionWeight)
        self.weigh = Einsum("BTD,DI->BTI", dims, kind=SelectionWeight)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T Q"],
        each: Reach,
        attend: Attend,
    ) -> tuple[IndexQuery, Float[Array, "B T J"]]:
        """Computes the indexer's queries and keys of these tokens. `latent` is the latent of attention's queries."""
        x, latent = jax.lax.stop_gradient((x, latent))
        # A selection is discrete: a small rounding error can select another token.
        with jax.default_matmul_precision("highest"):
            q, k = self.q(latent), self.k_norm(self.k(x))
            weights = self.weigh(wide(x)) * self.scale
        k = self.positioned(k[:, :, None], each, attend)[:, :, 0]
        return IndexQuery(self.positioned(q, each, attend), weights), k

    def positioned(self, x: Float[Array, "B T N J"], each: Reach, attend: Attend) -> Float[Array, "B T N J"]:
        """Applies RoPE to the first P features, always with pairs in halves (`Rope.pairs`)."""
        halves = each.rope and each.rope.model_copy(update={"pairs": "halves"})
        first = rotate_heads(x[..., : self.turns], Reach(rope=halves), attend)
        return jnp.concatenate([first, x[..., self.turns :]], -1)

    def pick(self, query: IndexQuery, keys: Float[Array, "B S J"], see: See, window: int | None) -> See:
        """Restricts each query to the tokens with the best scores among those it may attend to."""
        if isinstance(keys.shape[1], int) and keys.shape[1] <= self.topk:
            # At most topk tokens: all are selected.
            return see
        seen = see.dense(window)
        scores = sum_scores(query, wide(keys))
        return replace(see, picked=seen & top_k_mask(jnp.where(seen, scores, -jnp.inf), self.topk))


def sum_scores(query: IndexQuery, keys: Float[Array, "B S J"]) -> Float[Array, "B T S"]:
    """Computes scores and sums them over heads. For long sequences, computes one head at a time: the scores of 64 heads for 8,192
    queries and 8,192 keys would take 17 GB."""

    def head_sum(q: Float[Array, "B T I J"], weights: Float[Array, "B T I"]) -> Float[Array, "B T S"]:
        with jax.default_matmul_precision("highest"):
            products = jnp.einsum("BTIJ,BSJ->BTIS", wide(q), keys)
            return jnp.einsum("BTIS,BTI->BTS", jax.nn.relu(products), weights)

    B, T, I, _ = query.q.shape
    sizes = (B, T, I, keys.shape[1])
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) <= AT_ONCE:
        return head_sum(*query)
    first = jnp.zeros((B, T, keys.shape[1]), keys.dtype)
    heads = tuple(jnp.moveaxis(a[:, :, :, None], 2, 0) for a in query)
    return jax.lax.scan(lambda total, head: (total + head_sum(*head), None), first, heads)[0]


def top_k_mask(scores: Float[Array, "B T S"], k: int) -> Bool[Array, "B T S"]:
    """Marks the k largest scores along S. The first of equal scores is marked."""
    S = scores.shape[-1]
    # A symbolic S may turn out to be less than k, so k scores of -inf are appended.
    wide = scores if isinstance(S, int) else jnp.pad(scores, ((0, 0), (0, 0), (0, k)), constant_values=-jnp.inf)
    indexes = jax.lax.top_k(wide, k)[1]
    mark = jax.vmap(jax.vmap(lambda row, at: jnp.zeros_like(row, bool).at[at].set(True)))
    return mark(wide, indexes)[..., :S]
