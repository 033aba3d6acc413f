"""Attention over pages: each row's keys and values lie scattered over a pool (Kwon et al. 2023, arXiv:2309.06180).

`reference` gathers the pages and attends; it is the specification. Kernels that read pages in place register beside it.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.core.errors import Unsupported
from argosy.core.registry import Registry
from argosy.ops.attention import NOWHERE, Implementation, Score, See, attention
from argosy.ops.choice import asked_for
from argosy.parallel.scope import platform


def paged_attention(
    q: Float[Array, "B T N H"],
    pools: tuple[Float[Array, "pages page K H"], Float[Array, "pages page K U"]],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """Causal attention of queries at positions `at` over the tokens that each row has in a pool of pages: [B T N U].

    Args:
        pools: of keys and of values.
        table: the pages of each row, in order. A page out of range, -1 included, is nobody's: its tokens are not seen.
        lengths: tokens of each row that lie in its pages, these queries' own included. What lies beyond may hold anything.
        lse: also the log-sum-exp of each query, [B T N] float32.

    Raises:
        Unsupported: the implementation asked for by name cannot do this.
    """
    name = asked_for("paged_attention")
    for candidate in [name] if name else PREFERENCE.get(platform(), ()):
        chosen: Implementation = IMPLEMENTATIONS[candidate]
        reason = chosen.refuses(q, pools, table, lengths, score, lse)  # pyright: ignore[reportArgumentType]
        if reason is None:
            return chosen.run(q, pools, table, lengths, at, score, lse=lse)
        if name:
            raise Unsupported(f"paged attention `{name}`: {reason}")
    return reference(q, pools, table, lengths, at, score, lse=lse)


def reference(
    q: Array,
    pools: tuple[Array, Array],
    table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    at: Int[Array, "B T"],
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """The pages of each row gathered, then plain attention."""
    keys, values = (gathered(pool, table, lengths).astype(q.dtype) for pool in pools)
    k_at = token_positions(table, lengths, *pools[0].shape[:2])
    return attention(q, keys, values, See(at, k_at), score, lse=lse)


def gathered(pool: Float[Array, "pages page *rest"], table: Int[Array, "B P"], lengths: Int[Array, "B"]) -> Array:
    """The tokens of each row in order, [B P*page *rest]. What is nobody's is zero: a recycled page may hold NaN, and zero
    times NaN is NaN."""
    pages, page = pool.shape[:2]
    tokens = pool[jnp.clip(table, 0, pages - 1)].reshape(len(table), -1, *pool.shape[2:])
    owned = token_positions(table, lengths, pages, page) < NOWHERE
    return jnp.where(owned.reshape(*owned.shape, *(1,) * (tokens.ndim - 2)), tokens, jnp.zeros((), pool.dtype))


def token_positions(table: Int[Array, "B P"], lengths: Int[Array, "B"], pages: int, page: int) -> Int[Array, "B S"]:
    """The position of each token that the pages of a row hold; `NOWHERE` for what is not the row's."""
    at = jnp.arange(table.shape[1] * page, dtype=jnp.int32)
    valid = jnp.repeat((table >= 0) & (table < pages), page, axis=1, total_repeat_length=len(at))
    return jnp.where(valid & (at < lengths[:, None]), at, NOWHERE)


REFERENCE = Implementation(reference, lambda *_: None)

IMPLEMENTATIONS = Registry("paged attention implementation")
IMPLEMENTATIONS.add("reference", REFERENCE)
IMPLEMENTATIONS.add("blocked", "argosy.ops.paged_blocked:BLOCKED")

# What to try first on each platform.
PREFERENCE: dict[str, tuple[str, ...]] = dict.fromkeys(("cpu", "gpu", "tpu"), ("blocked",))
