"""Segments of packed rows: where each begins, and the positions of its tokens. Adjacent tokens with equal numbers form a segment."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from argosy.ops.attention import Score


def segment_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns whether each token is the first of its segment."""
    first = jnp.ones_like(segments[:, :1], bool)
    return jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token, counted from the start of its segment."""
    t = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return t - jax.lax.cummax(jnp.where(segment_starts(segments), t, 0), axis=1)


def window_segments(segments: Int[Array, "B T"], score: Score) -> Int[Array, "B T"]:
    """Splits segments at chunk boundaries if the layer's window is chunked. Otherwise returns them unchanged."""
    if not (score.chunked and score.window):
        return segments
    starts = segment_starts(segments) | (segment_positions(segments) % score.window == 0)
    return jnp.cumsum(starts, 1, dtype=jnp.int32)


def row_places(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The index of each token within its row."""
    return jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
