"""How far two distributions over different sets of outcomes are apart: the Wasserstein distance of their sorted probabilities.

With every cost of transport 1 and outcomes that cannot be identified with each other, the distance of Boizard et al. (universal logit
distillation, arXiv:2402.12030, equation 5) is the sum of the differences of both probabilities in falling order, the shorter list
filled up with zeros. It is 0 for permutations of one distribution, and at most 2.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

FARTHEST = 2.0


def sorted_distance(p: Float[Array, "*R V"], q: Float[Array, "*R U"]) -> Float[Array, "*R"]:
    """The sum of |p - q| over the probabilities in falling order. They may sum to less than 1, as joint probabilities do."""
    size = max(p.shape[-1], q.shape[-1])
    first, second = (_falling(r, size) for r in (p, q))
    return jnp.sum(jnp.abs(first - second), -1)


def _falling(p: Float[Array, "*R V"], size: int) -> Float[Array, "*R S"]:
    ordered = jnp.flip(jnp.sort(p, -1), -1)
    return jnp.pad(ordered, [(0, 0)] * (p.ndim - 1) + [(0, size - p.shape[-1])])
