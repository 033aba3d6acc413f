"""Seam 2: how queries meet keys (attention), and how a state is carried along (recurrence).

A layer says what it keeps of the past, `holds() -> Spec`; the caller allocates that (`contiguous`, `paged`). Then the layer calls

    y, cache = attend(q, held, cache, read, score)       attention
    y, cache = attend.recur(step, inputs, cache)         recurrence: step(inputs, carry) -> y, state

and asks `attend.positions` for rope. A strategy is a pytree whose every array leads with the batch, so rows can be split over
devices and pipelines without knowing which strategy it is. There is no decode twin of a model and no mode.

    Packed(segments)                        trains: whole sequences, several to a row
    Contiguous(at, live)                    evaluates and decodes: one buffer a row, rows of any length
    Paged(table, slots, lengths, new, t)    serves: rows own pages of a pool (Kwon et al. 2023, arXiv:2309.06180)
    Ragged(groups)                          serves rows of several widths in one call (`parts.ragged`)
    Bidirectional(segments)                 encoders and diffusion: everything in a segment sees everything
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.models.parts.cache import RING, ROW, Cache, beside, is_ring, nobodys, states, with_tokens
from argosy.ops.attention import Score, See, attention
from argosy.ops.paged_attention import gathered, paged_attention, token_positions

# Cosines and sines of the tokens by `Rope.key`, which a stack computes once for all its layers.
Angled = dict[str, Any] | None


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

    def of_rows(self, cut: Callable[[Array], Array]) -> "Read":
        """The same for some rows of the call; `cut` takes theirs out of an array of all its tokens."""
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

    def of_rows(self, cut: Callable[[Array], Array]) -> Read:
        return self


HEADS = Heads()


class Carry(NamedTuple):
    """For a recurrent layer: the state after the last token of the call before (None: there was none), where a sequence
    begins, and which tokens are real. The others must leave the state alone."""

    state: Cache | None
    starts: Bool[Array, "B T"]
    live: Bool[Array, "B T"]


Recurrence = Callable[[tuple[Array, ...], Carry], tuple[Array, Cache]]


class Recurs:
    """Strategies whose calls are rows of one width."""

    def recur(self: Any, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        """A recurrence over the rows of a call.

        Args:
            step: of inputs [B T ...] and the `Carry` of these rows; gives [B T ...], and the state after the last token.
        """
        y, state = step(inputs, self.carry(cache))
        return y, self.keep(cache, state)


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

    def __call__(
        self, q: Float[Array, "B T N H"], held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score
    ) -> tuple[Float[Array, "B T N U"], Cache | None]: ...

    def recur(
        self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None
    ) -> tuple[Array, Cache | None]: ...


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
    """Attention on rings that held `before` tokens, and on the new ones.

    Args:
        past: the rings as they were, by plain name.
    """
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


def _chunks(segments: Int[Array, "B T"], score: Score) -> Int[Array, "B T"]:
    """The segments, cut where a chunk begins if the window is one."""
    if not (score.chunked and score.window):
        return segments
    starts = _segment_starts(segments) | (_segment_positions(segments) % score.window == 0)
    return jnp.cumsum(starts, 1, dtype=jnp.int32)


def _rows(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)


@_strategy("absorb")
class Packed(Recurs):
    """The sequences themselves, causal within each segment; segment 0 is padding. Training, and evaluating whole texts."""

    segments: Int[Array, "B T"]
    absorb: bool | None = None
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return _segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at, segments = _rows(self.segments), _chunks(self.segments, score)
        see = See(at, at, segments, segments, aligned=True)
        return meet(q, held, read, score, see, self.absorb), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, _segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy()
class Bidirectional(Recurs):
    """Everything in a segment sees everything in it; segment 0 is padding."""

    segments: Int[Array, "B T"]
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return _segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at, segments = _rows(self.segments), _chunks(self.segments, score)
        see = See(at, at, segments, segments, causal=False, aligned=True)
        return meet(q, held, read, score, see, False), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, _segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy("absorb", "fresh")
class Contiguous(Recurs):
    """A buffer [B S ...] for each layer. Token t of row b lies at `at[b, t]`; tokens that are not `live` (padding on the right
    of shorter rows), and positions outside the buffer, are written nowhere, and what they compute has no meaning.

    fresh: these tokens are the first, `at` is 0..T-1. They then meet each other alone, as in training, and not the whole
    buffer: scores are [T T] and causal, where they would be [T S] and dense.
    """

    at: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    absorb: bool | None = None
    fresh: bool = False
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.at

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Contiguous writes to a cache: allocate one with `contiguous`"
        B, past = len(q), cache
        if is_ring(cache, held):
            cache = with_tokens(cache, jnp.arange(B), held, self.at, self.live)
            if self.fresh:
                return self._fresh(q, held, read, score), cache
            before = jnp.where(self.live[:, 0], self.at[:, 0], 0)
            rings = {n: past[RING + n] for n in held}
            return meet_ring(q, held, rings, before, self.at, self.live, read, score, self.absorb), cache
        row, S = jnp.arange(B)[:, None], cache[next(iter(held))].shape[1]
        where = nobodys(jnp.where(self.live, self.at, S), S)
        written = {n: cache[n].at[row, where].set(new.astype(cache[n].dtype), mode="drop") for n, new in held.items()}
        cache = cache | written
        if self.fresh:
            return self._fresh(q, held, read, score), cache
        k_at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        length = 1 + jnp.max(jnp.where(self.live, self.at, -1), 1, keepdims=True)
        stored = {n: owned(cache[n], k_at < length).astype(q.dtype) for n in held}
        return meet(q, stored, read, score, See(self.at, k_at), self.absorb), cache

    def _fresh(self, q: Array, held: Cache, read: Read, score: Score) -> Array:
        return meet(q, held, read, score, See(self.at, self.at, aligned=True), self.absorb)

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(cache and states(cache), self.at == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache and cache | {ROW + n: new.astype(cache[ROW + n].dtype) for n, new in state.items()}


def owned(a: Array, own: Bool[Array, "B S"]) -> Array:
    """An array [B S ...] with zeros where nothing of the row lies: what a former owner left may be NaN, and zero times NaN is
    NaN."""
    return jnp.where(own.reshape(*own.shape, *(1,) * (a.ndim - 2)), a, jnp.zeros((), a.dtype))


@_strategy("absorb")
class Paged(Recurs):
    """Row b owns the pages `table[b]` of a pool [pages page ...] and the slot `slots[b]` of rings and states; it has
    `lengths[b]` tokens and brings `new[b]` of the T.

    A slot or page out of range, -1 included, is nobody's: nothing is read from it, and writes to it are dropped, as are those of
    tokens beyond the row's table. What a former owner left in a page or slot may be anything, NaN included.
    """

    table: Int[Array, "B P"]
    slots: Int[Array, "B"]
    lengths: Int[Array, "B"]
    new: Int[Array, "B"]
    t: Int[Array, "B T"]  # 0..T-1 in each row: it leads with the batch, and says T
    absorb: bool | None = None
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.lengths[:, None] + self.t

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.t < self.new[:, None]

    def __call__(self, q: Array, held: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Paged writes to a pool: allocate one with `paged`"
        at = self.positions
        if is_ring(cache, held):
            rings = {n: jnp.take(cache[RING + n], self.slots, axis=0, mode="clip") for n in held}
            y = meet_ring(q, held, rings, self.lengths, at, self.live, read, score, self.absorb)
            return y, with_tokens(cache, self.slots, held, at, self.live)
        where = self._places(*cache[next(iter(held))].shape[:2])
        pools = {n: cache[n].at[where].set(new.astype(cache[n].dtype), mode="drop") for n, new in held.items()}
        total = self.lengths + self.new
        if read is HEADS and not score.chunked:
            y = paged_attention(q, (pools["k"], pools["v"]), self.table, total, at, score)
        else:
            pages, page = pools[next(iter(held))].shape[:2]
            mine = {n: gathered(pool, self.table, total).astype(q.dtype) for n, pool in pools.items()}
            y = meet(q, mine, read, score, See(at, token_positions(self.table, total, pages, page)), self.absorb)
        return y, cache | pools

    def _places(self, pages: int, page: int) -> tuple[Array, Array]:
        """Page and place of each new token; past the last page where it has none."""
        P = self.table.shape[1]
        number = self.positions // page
        own = jnp.take_along_axis(self.table, jnp.clip(number, 0, P - 1), axis=1)
        mine = self.live & (number >= 0) & (number < P)
        return jnp.where(mine, nobodys(own, pages), pages), self.positions % page

    def carry(self, cache: Cache | None) -> Carry:
        state = cache and {n: jnp.take(p, self.slots, axis=0, mode="clip") for n, p in states(cache).items()}
        return Carry(state, self.positions == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        if cache is None:
            return None
        out = dict(cache)
        for n, new in state.items():
            pool = cache[ROW + n]
            out[ROW + n] = pool.at[nobodys(self.slots, len(pool))].set(new.astype(pool.dtype), mode="drop")
        return out
