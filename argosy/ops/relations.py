"""Relations of tokens within a layer, and how far two models' are apart (MiniLM, arXiv:2002.10957; MiniLMv2, arXiv:2012.15828).

The vectors of all heads of a token, one after the other, are cut into A relation heads of equal size d. For each of them

    R = softmax(x y' / sqrt(d))        x and y: both queries, both keys, both values, or queries and keys

is a distribution over tokens, [T T], whatever the number and size of a model's heads (MiniLMv2, equations 4 to 7). The divergence
of two models at token t is the mean of KL(R_teacher[t] || R_student[t]) over relation heads. Queries and keys, cut as the layer's own
heads, give its attention map at the usual scale, without window, soft cap and sinks.

Differences from the papers, whose models are encoders: a token is related to itself and to those before it in its segment. Keys that
several query heads share are repeated for them where they meet queries, and are as they are elsewhere.

One relation head is computed at a time, and again in the backward pass: [B T T] exists, never [B heads T T].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.ops.attention import UNSEEN, See
from argosy.ops.precision import wide

# Both sides of a relation, by head: [B T heads size] each, of any heads and sizes.
Sides = tuple[Float[Array, "B T _ _"], Float[Array, "B T _ _"]]


def relation_divergence(ours: Sides, theirs: Sides, segments: Int[Array, "B T"], heads: int) -> Float[Array, "B T"]:
    """The mean of KL(theirs || ours) over relation heads, in nats, at each token.

    Args:
        ours, theirs: the two sides of the relation in each model; both sides of a model have as many features a token.
        segments: which sequence of its row a token belongs to.
        heads: relation heads; divides the features of both models.
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
    """The features of all heads, cut into relation heads; in float32 at least."""
    B, T = x.shape[:2]
    return jnp.moveaxis(wide(x).reshape(B, T, heads, -1), 2, 0)


def log_relation(x: Float[Array, "B T d"], y: Float[Array, "B S d"], seen: Bool[Array, "B T S"]) -> Float[Array, "B T S"]:
    """The log of a relation; finite, and without meaning, where a token is not seen."""
    scores = jnp.einsum("BTd,BSd->BTS", x, y) * x.shape[-1] ** -0.5
    return jax.nn.log_softmax(jnp.where(seen, scores, UNSEEN), -1)
