"""Self-attention relations of tokens within a layer, and the divergence of two models' relations (MiniLM, arXiv:2002.10957; MiniLMv2,
arXiv:2012.15828).

The concatenated vectors of all heads of a token are cut into A relation heads of equal size d. For each relation head,

    R = softmax(x y' / sqrt(d))        x and y: both queries, both keys, both values, or queries and keys

is a distribution over tokens, [T T], whatever the number and size of the model's own heads (MiniLMv2, equations 4 to 7). The divergence
of two models at token t is the mean of KL(R_teacher[t] || R_student[t]) over relation heads. For queries and keys, with as many
relation heads as the layer has heads, R is the layer's attention map at the usual scale, without window, soft cap and sinks.

Differences from the papers, whose models are encoders: a token is related to itself and to earlier tokens of its segment. Keys that
several query heads share are repeated for the relation of queries and keys, but not for that of keys and keys.

One relation head is computed at a time, and computed again in the backward pass. An array [B T T] exists at once, never [B heads T T].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.ops.attention import UNSEEN, See
from argosy.ops.precision import wide

# Both sides of a relation, x and y, each [B T heads size]. The numbers and sizes of heads may differ.
Sides = tuple[Float[Array, "B T _ _"], Float[Array, "B T _ _"]]


def relation_divergence(ours: Sides, theirs: Sides, segments: Int[Array, "B T"], heads: int) -> Float[Array, "B T"]:
    """Computes the mean of KL(theirs || ours) over relation heads, in nats, at each token.

    Args:
        ours, theirs: the two sides of the relation in each model. Both sides of a model have the same number of features per token.
        segments: the segment of each token.
        heads: the number of relation heads, which must divide the number of features of both models.
    """
    at = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    seen = See(at, at, segments, segments).dense(None)
    cut = [relation_heads(x, heads) for x in (*ours, *theirs)]

    @jax.checkpoint
    def of_head(total: Array, head: list[Array]) -> tuple[Array, None]:
        a, b, c, d = head
        log_ours, other = log_relation(a, b, seen), log_relation(c, d, seen)
        apart = jnp.where(seen, jnp.exp(other) * (other - log_ours), 0.0)
        return total + jnp.sum(apart, -1), None

    start = jnp.zeros(segments.shape, cut[0].dtype)
    return jax.lax.scan(of_head, start, cut)[0] / heads


def relation_heads(x: Float[Array, "B T _ _"], heads: int) -> Float[Array, "heads B T d"]:
    """Cuts the features of all heads into relation heads. Returns float32 at least."""
    B, T = x.shape[:2]
    return jnp.moveaxis(wide(x).reshape(B, T, heads, -1), 2, 0)


def log_relation(x: Float[Array, "B T d"], y: Float[Array, "B S d"], seen: Bool[Array, "B T S"]) -> Float[Array, "B T S"]:
    """Computes the log of a relation. Where `seen` is false, the values are finite but have no meaning."""
    scores = jnp.einsum("BTd,BSd->BTS", x, y) * x.shape[-1] ** -0.5
    return jax.nn.log_softmax(jnp.where(seen, scores, UNSEEN), -1)
