"""A distance of two distributions over different vocabularies: the Wasserstein distance of their sorted probabilities.

This is the loss of universal logit distillation (Boizard et al., arXiv:2402.12030, equation 5), where outcomes of the two sides cannot
be matched and every transport costs 1. It is the sum of the absolute differences of both probabilities in descending order, with the
shorter list padded with zeros. It is 0 if one distribution is a permutation of the other, and at most 2.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

FARTHEST = 2.0


def sorted_distance(p: Float[Array, "*R V"], q: Float[Array, "*R U"]) -> Float[Array, "*R"]:
    """Computes the sum of |p - q| over probabilities in descending order. They may sum to less than 1, as joint probabilities do."""
    size = max(p.shape[-1], q.shape[-1])
    first, second = (_falling(r, size) for r in (p, q))
    return jnp.sum(jnp.abs(first - second), -1)


def _falling(p: Float[Array, "*R V"], size: int) -> Float[Array, "*R S"]:
    ordered = jnp.flip(jnp.sort(p, -1), -1)
    return jnp.pad(ordered, [(0, 0)] * (p.ndim - 1) + [(0, size - p.shape[-1])])
