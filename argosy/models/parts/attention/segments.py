"""Documents in packed rows: where each begins, and the places of its tokens. A segment is a number that differs from its neighbors'."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from argosy.ops.attention import Score


def segment_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a token is the first of its segment."""
    first = jnp.ones_like(segments[:, :1], bool)
    return jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of a token within its segment."""
    t = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return t - jax.lax.cummax(jnp.where(segment_starts(segments), t, 0), axis=1)


def window_segments(segments: Int[Array, "B T"], score: Score) -> Int[Array, "B T"]:
    """The segments, split at chunk boundaries if the window is a chunk."""
    if not (score.chunked and score.window):
        return segments
    starts = segment_starts(segments) | (segment_positions(segments) % score.window == 0)
    return jnp.cumsum(starts, 1, dtype=jnp.int32)


def row_places(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of a token within its row."""
    return jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
