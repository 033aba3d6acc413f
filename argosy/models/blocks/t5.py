"""The module of T5's encoder (`models.t5` has the equations)."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import HEADS, Attend
from argosy.models.parts.attention.cache import Cache, Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import GLU, MLP
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.stack import Aux, Execution, Layer, Stack
from argosy.ops.attention import Score
from argosy.parallel.scope import constrain


def nearby_buckets(buckets: int, most: int) -> np.ndarray:
    """Returns the bucket of each distance 0 .. `most` in one direction. Longer distances have the last bucket.

    Half of the buckets are for exact distances. The others grow logarithmically. They are computed in float32, as in the reference:
    otherwise a distance on a border might fall into the other bucket.

    Args:
        buckets: the number of buckets for both directions together.
    """
    half, exact = buckets // 2, buckets // 4
    far = np.arange(most + 1)
    grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(most / exact))
    steps = grown * np.float32(half - exact)
    return np.where(far < exact, far, np.minimum(exact + steps.astype(np.int64), half - 1)).astype(np.int32)


def distance_buckets(tokens: Int[Array, " T"], buckets: int, most: int) -> Int[Array, "T T"]:
    """Returns the bucket of each pair of a query and a key. The upper half of the buckets is for keys after the query.

    Args:
        tokens: the positions of the tokens.
        buckets, most: as in `nearby_buckets`.
    """
    ahead = tokens[None, :] - tokens[:, None]
    near = jnp.asarray(nearby_buckets(buckets, most))[jnp.minimum(jnp.abs(ahead), most)]
    return near + (buckets // 2) * (ahead > 0).astype(jnp.int32)


class T5Attention(nnx.Module):
    """Attention with a bias for each distance (T5's relative positions). Scores are not scaled."""

    marks = ("qkv", "attention", "attention_out")

    def __init__(self, config: Any):
        dims = config.dims
        N, H, layers = config.heads, config.head_size, config.layers
        # Scores are not scaled, so the weight of queries is initialized smaller by that factor.
        self.q = Einsum("BTD,DNH->BTNH", dims, scale=(config.width * H) ** -0.5)
        self.k = Einsum("BTD,DKH->BTKH", dims)
        self.v = Einsum("BTD,DKH->BTKH", dims)
        self.o = Einsum("BTNH,NHD->BTD", dims, scale=(N * H * 2 * layers) ** -0.5)

    def __call__(self, x: Float[Array, "B T D"], cache: Cache | None, attend: Attend, bias: Float[Array, "N T T"]) -> Any:
        q, k, v = (checkpoint_name(a, "qkv") for a in (self.q(x), self.k(x), self.v(x)))
        y, cache = attend(q, {"k": k, "v": v}, cache, HEADS, score=Score(1.0, bias=bias))
        return checkpoint_name(self.o(checkpoint_name(y, "attention")), "attention_out"), cache


class T5Block(nnx.Module):
    """Attention, then the feed-forward layer, each with a norm before it.

    The condition is the bias table [B A N] that all layers share (T5), repeated for each row. None: each layer has its own (UMT5).
    """

    def __init__(self, config: Any):
        self.buckets, self.distance = config.buckets, config.distance
        self.bias = None if config.shared_bias else bias_table(config)
        self.attn_norm, self.mlp_norm = (RMSNorm(config.width, config.norm_eps) for _ in range(2))
        self.attn = T5Attention(config)
        self.mlp = GLU(config.dims, config.activation) if config.gated else MLP(config.dims, config.activation, bias=False)

    def holds(self, each: Any) -> Spec:
        return Spec()

    def __call__(self, x: Float[Array, "B T D"], each: Any, cache: Cache | None, attend: Attend, condition: Any = None) -> Any:
        buckets = distance_buckets(jnp.arange(x.shape[1], dtype=jnp.int32), self.buckets, self.distance)
        rows = condition[0][buckets] if self.bias is None else self.bias.take(buckets)
        y, cache = self.attn(self.attn_norm(x), cache, attend, jnp.moveaxis(rows, 2, 0))
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, {}


class T5Encoder(nnx.Module):
    """Maps each token to a vector."""

    def __init__(self, config: Any, plan: Sequence[Layer], run: Execution | None):
        self.config, self.dtype = config, jnp.float32
        self.embed = Einsum("BTV,VD->BTD", config.dims, scale=1.0)
        self.bias = bias_table(config) if config.shared_bias else None
        self.layers = Stack(plan, lambda kind: T5Block(config), run=run)
        self.norm = RMSNorm(config.width, config.norm_eps)

    def embedded(self, tokens: Int[Array, "B T"], attend: Attend) -> Float[Array, "B T D"]:
        """Computes the input of the first layer."""
        return self.embed.take(tokens).astype(self.dtype)

    def hidden(self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Computes a vector for each token. Also returns the cache, unchanged, and the aux outputs of the layers."""
        x, shared = self.embedded(tokens, attend), None
        if self.bias is not None:
            table = self.bias.take(jnp.arange(self.config.buckets))
            shared = jnp.broadcast_to(table, (x.shape[0], *table.shape))
        x, cache, aux = self.layers(x, cache, attend, shared)
        return constrain(self.norm(x), "B T D"), cache, aux

    def __call__(self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None) -> tuple[Float[Array, "B T D"], Any, Aux]:
        return self.hidden(tokens, attend, cache)


def bias_table(config: Any) -> Einsum:
    """Builds the table of biases [A N], with a row for each bucket. Rows are looked up, so weight decay and matrix optimizers leave the
    table alone."""
    return Einsum("BA,AN->BN", config.dims, scale=config.width**-0.5)
