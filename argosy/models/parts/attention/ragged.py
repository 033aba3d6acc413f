"""The strategy for a batch whose rows have different numbers of new tokens: one in decoding rows, many in prefill rows.

Tokens are flat, [1 tokens]: those of the first group of rows, then those of the next. Projections, feed-forward layers and experts
therefore compute no padding to the longest row. Only attention and recurrence see rows.

If a model caches everything in pages (`rows_share_pages`), several rows of one call may belong to one sequence: each row attends to
what earlier rows wrote in the same call. Rings and states are read as they were before the call. A model with rings or states
therefore needs one row per sequence.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from argosy.models.parts.attention.attend import HEADS, Angled, Paged, Read
from argosy.models.parts.attention.cache import Cache, Specs, is_ring
from argosy.models.parts.attention.recurrence import Recurrence
from argosy.ops.attention import Score


def rows_share_pages(specs: Specs, longest: int, slack: int = 0) -> bool:
    """Whether a model caches everything in pages, so that several rows of one call may belong to one sequence.

    Args:
        longest, slack: as in `cache.empty_pools`.
    """
    return all(e.kind == "token" for spec, _ in specs.values() for e in spec.entries(longest, slack))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ragged:
    """Groups of rows with equally many tokens. A group of B rows with T tokens each takes B * T of the flat tokens."""

    groups: tuple[Paged, ...]
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "1 tokens"]:
        return jnp.concatenate([group.positions.reshape(1, -1) for group in self.groups], 1)

    @property
    def live(self) -> Bool[Array, "1 tokens"]:
        return jnp.concatenate([group.live.reshape(1, -1) for group in self.groups], 1)

    def split(self, a: Array) -> list[Array]:
        """Splits an array [1 tokens ...] into one array [B T ...] for each group."""
        out, start = [], 0
        for group in self.groups:
            B, T = group.t.shape
            out.append(a[0, start : start + B * T].reshape(B, T, *a.shape[2:]))
            start += B * T
        return out

    def joined(self, parts: list[Array]) -> Array:
        """The inverse of `split`."""
        return jnp.concatenate([part.reshape(1, -1, *part.shape[2:]) for part in parts], 1)

    def in_stack(self, cache: Cache, at: Int[Array, ""]) -> "Ragged":
        """Returns the strategy for layer `at` of a stacked cache, as `Paged.in_stack`."""
        return replace(self, groups=tuple(group.in_stack(cache, at) for group in self.groups))

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        queries, new = self.split(q), {name: self.split(a) for name, a in entries.items()}
        reads = [read.of_rows(lambda a, i=i: self.split(a)[i]) for i in range(len(self.groups))]
        parts = [{name: a[i] for name, a in new.items()} for i in range(len(self.groups))]
        out = []
        if cache is None or is_ring(cache, entries):
            for group, mine, row_read, part in zip(self.groups, queries, reads, parts):
                y, cache = group(mine, part, cache, row_read, score=score)
                out.append(y)
            return self.joined(out), cache
        # Groups write to different pages, so all groups can write before any group reads. A read between two writes would make XLA copy
        # the pool.
        for group, part in zip(self.groups, parts):
            cache = group.write(part, cache, score)
        for group, mine, row_read, part in zip(self.groups, queries, reads, parts):
            out.append(group.attend(mine, part, cache, row_read, score))
        return self.joined(out), cache

    def recur(self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        parts = [self.split(a) for a in inputs]
        out = []
        for i, group in enumerate(self.groups):
            y, cache = group.recur(step, tuple(part[i] for part in parts), cache)
            out.append(y)
        return self.joined(out), cache
