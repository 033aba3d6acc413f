"""Seam 2: how a token meets the tokens before it, through keys and values (attention) or a state carried along (recurrence).

A layer says what it keeps of the past, `holds() -> Spec`; the caller allocates that (`contiguous`, `paged`). Then the layer calls

    y, cache = attend(q, held, cache, read, score)       attention
    state, starts, live = attend.carry(cache)            recurrence: the state so far, where it restarts, which tokens are real
    cache = attend.keep(cache, state)

and asks `attend.positions` for rope. A strategy is a pytree whose every array leads with the batch, so rows can be split over
devices and pipelines without knowing which strategy it is. There is no decode twin of a model and no mode.

    Packed(segments)                        trains: whole sequences, several to a row
    Contiguous(at, live)                    evaluates and decodes: one buffer a row, rows of any length
    Paged(table, slots, lengths, new, t)    serves: rows own pages of a pool (Kwon et al. 2023, arXiv:2309.06180)
    Bidirectional(segments)                 encoders and diffusion: everything in a segment sees everything
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.models.parts.cache import NOWHERE, Cache, beside, is_ring, whole, with_tokens
from argosy.ops.attention import Score, See, attention

Capacity = int | Int[Array, "B _"]


@runtime_checkable
class Read(Protocol):
    """How what is held becomes keys and values."""

    def expand(self, held: Cache) -> tuple[Array, Array]:
        """Keys [B S K H] and values [B S K U]."""
        ...

    def absorb(self, q: Array, held: Cache) -> tuple[Array, Array, Array] | None:
        """Queries, keys and values that give the same scores in the space of what is held; None: there is no such form."""
        ...

    def release(self, y: Array) -> Array:
        """An output in that space, back in heads."""
        ...

    def narrow(self, held: Cache, see: See, window: int | None) -> See:
        """Who sees whom, where what is held has a say in it (sparse attention)."""
        ...

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        """Of T queries against S tokens, a row: expanded, absorbed."""
        ...


class Heads:
    """The keys and values themselves are held."""

    def expand(self, held: Cache) -> tuple[Array, Array]:
        return held["k"], held["v"]

    def absorb(self, q: Array, held: Cache) -> None:
        return None

    def release(self, y: Array) -> Array:
        return y

    def narrow(self, held: Cache, see: See, window: int | None) -> See:
        return see

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        return 0, 0


HEADS = Heads()


class Carry(NamedTuple):
    """For a recurrent layer: the state after the last token of the call before (None: there was none), where a sequence
    begins, and which tokens are real. The others must leave the state alone."""

    state: Cache | None
    starts: Bool[Array, "B T"]
    live: Bool[Array, "B T"]


@runtime_checkable
class Attend(Protocol):
    """What every strategy answers."""

    @property
    def positions(self) -> Int[Array, "B T"]:
        """Of this call's tokens, each counted from the start of its own sequence."""
        ...

    @property
    def live(self) -> Bool[Array, "B T"]:
        """Which tokens are real; what the others compute has no meaning."""
        ...

    def capacity(self, cache: Cache | None) -> Capacity:
        """The most tokens that a sequence of this call can reach, as far as what is held for it tells; one number for all,
        or one for each token or row."""
        ...

    def __call__(
        self, q: Float[Array, "B T N H"], held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score
    ) -> tuple[Float[Array, "B T N U"], Cache | None]: ...

    def carry(self, cache: Cache | None) -> Carry: ...

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None: ...


def meet(q: Array, held: Cache, read: Read, score: Score, see: See, absorb: bool | None) -> Array:
    """Attention on what is held: expanded or absorbed, whichever multiplies less, unless told."""
    if score.chunked and score.window and see.q_segment is None:
        see = replace(see, q_segment=see.q_at // score.window, k_segment=see.k_at // score.window)
    see = read.narrow(held, see, score.window)
    T, S = q.shape[1], see.k_at.shape[1]
    if absorb is None and not (isinstance(T, int) and isinstance(S, int)):
        absorb = False  # an export with lengths left open
    if absorb is not False and (form := read.absorb(q, held)) is not None:
        expanded, absorbed = read.multiplications(T, S)
        if absorb or absorbed <= expanded:
            return read.release(attention(*form, see, score))
    return attention(q, *read.expand(held), see, score)


def meet_ring(
    q: Array,
    held: Cache,
    past: Cache,
    before: Int[Array, "B"],
    at: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    read: Read,
    score: Score,
    absorb: bool | None,
) -> Array:
    """Attention on rings that held `before` tokens, and on the new ones."""
    size = next(iter(past.values())).shape[1]
    if score.window is None or score.window > size + 1:
        raise ValueError(f"a ring of {size} tokens cannot serve a window of {score.window}")
    both, k_at = beside(past, held, before, at, live, q.dtype)
    return meet(q, both, read, score, See(at, k_at), absorb)


def _strategy(*static: str) -> Any:
    """A frozen dataclass that is a pytree; `static` names the fields that are not arrays."""

    def wrap(cls: type) -> type:
        cls = dataclass(frozen=True)(cls)
        arrays = [f.name for f in fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, arrays, list(static))

    return wrap


def _segment_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    first = jnp.ones_like(segments[:, :1], bool)
    return jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)


def _segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    t = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return t - jax.lax.cummax(jnp.where(_segment_starts(segments), t, 0), axis=1)


def _segment_lengths(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Of the segment that each token is in."""
    at = _segment_positions(segments)
    ends = jnp.concatenate([_segment_starts(segments)[:, 1:], jnp.ones_like(segments[:, :1], bool)], 1)
    t = _rows(segments)
    end = jax.lax.cummin(jnp.where(ends, t, NOWHERE), axis=1, reverse=True)
    return at + end - t + 1


def _chunks(segments: Int[Array, "B T"], score: Score) -> Int[Array, "B T"]:
    """The segments, cut where a chunk begins if the window is one."""
    if not (score.chunked and score.window):
        return segments
    starts = _segment_starts(segments) | (_segment_positions(segments) % score.window == 0)
    return jnp.cumsum(starts, 1, dtype=jnp.int32)


def _rows(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)


@_strategy("absorb")
class Packed:
    """The sequences themselves, causal within each segment; segment 0 is padding. Training, and evaluating whole texts."""

    segments: Int[Array, "B T"]
    absorb: bool | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return _segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def capacity(self, cache: Cache | None) -> Capacity:
        return _segment_lengths(self.segments)

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at, segments = _rows(self.segments), _chunks(self.segments, score)
        see = See(at, at, segments, segments, aligned=True)
        return meet(q, held, read, score, see, self.absorb), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, _segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy()
class Bidirectional:
    """Everything in a segment sees everything in it; segment 0 is padding."""

    segments: Int[Array, "B T"]

    @property
    def positions(self) -> Int[Array, "B T"]:
        return _segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def capacity(self, cache: Cache | None) -> Capacity:
        return _segment_lengths(self.segments)

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at, segments = _rows(self.segments), _chunks(self.segments, score)
        see = See(at, at, segments, segments, causal=False, aligned=True)
        return meet(q, held, read, score, see, False), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, _segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy("absorb", "fresh")
class Contiguous:
    """A buffer [B S ...] for each layer. Token t of row b lies at `at[b, t]`; tokens that are not `live` (padding on the
    right of shorter rows) are written nowhere, and what they compute has no meaning.

    fresh: these tokens are the first, `at` is 0..T-1. They then meet each other alone, as in training, and not the whole
    buffer: scores are [T T] and causal, where they would be [T S] and dense.
    reach: the most tokens that each sequence will ever have, where the buffer does not tell.
    """

    at: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    absorb: bool | None = None
    fresh: bool = False
    reach: Int[Array, "B"] | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.at

    def capacity(self, cache: Cache | None) -> Capacity:
        return whole(cache).shape[1] if self.reach is None else self.reach[:, None]

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Contiguous writes to a cache: allocate one with `contiguous`"
        B, S = next(iter(cache.values())).shape[:2]
        if ring := is_ring(cache):
            past, cache = cache, with_tokens(cache, jnp.arange(B), held, self.at, self.live)
        else:
            row = jnp.arange(B)[:, None]
            where = jnp.where(self.live, self.at, S)  # past the end: dropped
            past, cache = (
                cache,
                {n: cache[n].at[row, where].set(held[n].astype(cache[n].dtype), mode="drop") for n in cache},
            )
        if self.fresh:
            return meet(q, held, read, score, See(self.at, self.at, aligned=True), self.absorb), cache
        if ring:
            before = jnp.where(self.live[:, 0], self.at[:, 0], 0)
            return meet_ring(q, held, past, before, self.at, self.live, read, score, self.absorb), cache
        k_at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        stored = {n: c.astype(q.dtype) for n, c in cache.items()}
        return meet(q, stored, read, score, See(self.at, k_at), self.absorb), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(cache, self.at == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache and {n: state[n].astype(cache[n].dtype) for n in cache}


@_strategy("absorb")
class Paged:
    """Row b owns the pages `table[b]` of a pool [pages page ...] and the slot `slots[b]` of the states; it has `lengths[b]`
    tokens and brings `new[b]` of the T. A slot or page out of range is nobody's: writes to it are dropped. `reach` as above."""

    table: Int[Array, "B P"]
    slots: Int[Array, "B"]
    lengths: Int[Array, "B"]
    new: Int[Array, "B"]
    t: Int[Array, "B T"]  # 0..T-1 in each row: it leads with the batch, and says T
    absorb: bool | None = None
    reach: Int[Array, "B"] | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.lengths[:, None] + self.t

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.t < self.new[:, None]

    def capacity(self, cache: Cache | None) -> Capacity:
        return self.table.shape[1] * whole(cache).shape[1] if self.reach is None else self.reach[:, None]

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Paged writes to a pool: allocate one with `paged`"
        at = self.positions
        if is_ring(cache):
            past = {n: jnp.take(c, self.slots, axis=0, mode="clip") for n, c in cache.items()}
            y = meet_ring(q, held, past, self.lengths, at, self.live, read, score, self.absorb)
            return y, with_tokens(cache, self.slots, held, at, self.live)
        pages, page = next(iter(cache.values())).shape[:2]
        B, P = self.table.shape
        S = P * page
        own = jnp.take_along_axis(self.table, jnp.minimum(at // page, P - 1), axis=1)
        where = jnp.where(self.live, own, pages), at % page
        cache = {n: cache[n].at[where].set(held[n].astype(cache[n].dtype), mode="drop") for n in cache}
        mine = {n: p[self.table].reshape(B, S, *p.shape[2:]).astype(q.dtype) for n, p in cache.items()}
        k_at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        return meet(q, mine, read, score, See(at, k_at), self.absorb), cache

    def carry(self, cache: Cache | None) -> Carry:
        state = cache and {n: jnp.take(p, self.slots, axis=0, mode="clip") for n, p in cache.items()}
        return Carry(state, self.positions == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache and {n: p.at[self.slots].set(state[n].astype(p.dtype), mode="drop") for n, p in cache.items()}
