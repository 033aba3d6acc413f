"""Seam 2: how queries meet keys (attention), and how a state is carried along (recurrence).

A layer declares what it caches, `holds() -> Spec`, and the caller allocates it (`contiguous`, `empty_pools`). Then the layer
calls

    y, cache = attend(q, entries, cache, read, score)       attention
    y, cache = attend.recur(step, inputs, cache)         recurrence: step(inputs, carry) -> y, state

and reads `attend.positions` for rope. A strategy is a pytree whose arrays all have the batch as leading axis, so rows can be
split over devices and pipelines without knowing the strategy. A model has no second version for decoding, and no mode.

    Packed(segments)                        training: whole sequences, several to a row
    Branched(segments, prefixes, at)        training: the same, where sequences share how they begin
    Contiguous(at, live)                    evaluation and decoding: one buffer a row, rows of any length
    Paged(table, slots, lengths, new, t)    serving: rows own pages of a pool (Kwon et al. 2023, arXiv:2309.06180)
    Ragged(groups)                          serving: rows of several widths in one call (`parts.attention.ragged`)
    Bidirectional(segments)                 encoders and diffusion: each token attends to its whole segment
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.core.errors import Unsupported
from argosy.models.parts.attention.cache import (
    JOINED,
    RING,
    ROW,
    WINDOW,
    AttentionWindow,
    Cache,
    entry_counts,
    is_ring,
    is_windowed,
    nobodys,
    rings_with_new,
    row_states,
    with_tokens,
)
from argosy.models.parts.attention.protocol import StaticProtocol
from argosy.models.parts.attention.recurrence import Carry, Recurrence, RowRecurrence
from argosy.models.parts.attention.segments import row_places, segment_positions, segment_starts, window_segments
from argosy.ops.attention import Score, See, attention
from argosy.ops.narrow import write_entries
from argosy.ops.paged.attention import (
    gather_pages,
    join_heads,
    keys_and_values,
    paged_attention,
    token_positions,
    with_longer_heads,
)
from argosy.ops.paged.blocked import attend_by_blocks, fits_one_block

# Cosines and sines of the tokens by `Rope.key`, computed once by a stack for all its layers.
Angled = dict[str, Any] | None


@runtime_checkable
class Read(Protocol):
    """How cached arrays become keys and values."""

    def expand(self, entries: Cache) -> tuple[Array, Array]:
        """Keys [B S K H] and values [B S K U]."""
        ...

    def absorb(self, q: Array, entries: Cache) -> tuple[Array, Array, Array] | None:
        """Queries, keys and values that give the same scores in the space of the cached arrays; None: there is no such form."""
        ...

    def release(self, y: Array) -> Array:
        """An output in that space, converted back to heads."""
        ...

    @property
    def narrows(self) -> bool:
        """Whether `narrow` picks some of the tokens. If so, it needs all of them at once."""
        ...

    def narrow(self, entries: Cache, see: See, window: int | None) -> See:
        """Restricts who attends to whom by the cached arrays (sparse attention)."""
        ...

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        """Multiplications per row for T queries against S tokens: expanded, absorbed."""
        ...

    def of_rows(self, cut: Callable[[Array], Array]) -> "Read":
        """The same for some rows of the call; `cut` takes theirs out of an array of all its tokens."""
        ...


class Heads:
    """Reads keys and values that are cached as they are."""

    narrows = False

    def expand(self, entries: Cache) -> tuple[Array, Array]:
        return entries["k"], entries["v"]

    def absorb(self, q: Array, entries: Cache) -> None:
        return None

    def release(self, y: Array) -> Array:
        return y

    def narrow(self, entries: Cache, see: See, window: int | None) -> See:
        return see

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        return 0, 0

    def of_rows(self, cut: Callable[[Array], Array]) -> Read:
        return self


HEADS = Heads()


@runtime_checkable
class Attend(Protocol, metaclass=StaticProtocol):
    """The interface of every strategy."""

    @property
    def positions(self) -> Int[Array, "B T"]:
        """Positions of this call's tokens, each counted from the start of its own sequence."""
        ...

    @property
    def live(self) -> Bool[Array, "B T"]:
        """Which tokens are real; results for the others have no meaning."""
        ...

    def __call__(
        self, q: Float[Array, "B T N H"], entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score
    ) -> tuple[Float[Array, "B T N U"], Cache | None]: ...

    def recur(
        self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None
    ) -> tuple[Array, Cache | None]: ...


@runtime_checkable
class StackedAttend(Attend, Protocol):
    """A strategy over caches whose rows it names by number, so that it can name those of one layer among all layers'."""

    def in_stack(self, cache: Cache, at: Int[Array, ""]) -> Attend: ...


def meet(
    q: Array, entries: Cache, read: Read, score: Score, see: See, absorb: bool | None, *, lse: bool = False
) -> Any:
    """Attention on cached arrays, expanded or absorbed: the form with fewer multiplications, unless `absorb` says which. With
    `lse` also its log-sum-exp."""
    if score.chunked and score.window and see.q_segment is None:
        see = replace(see, q_segment=see.q_at // score.window, k_segment=see.k_at // score.window)
    see = read.narrow(entries, see, score.window)
    T, S = q.shape[1], see.k_at.shape[1]
    if absorb is None and not (isinstance(T, int) and isinstance(S, int)):
        # An export with symbolic lengths.
        absorb = False
    if absorb is not False and (form := read.absorb(q, entries)) is not None:
        expanded, absorbed = read.multiplications(T, S)
        if absorb or absorbed <= expanded:
            y = attention(*form, see, score, lse=lse)
            return (read.release(y[0]), y[1]) if lse else read.release(y)
    return attention(q, *read.expand(entries), see, score, lse=lse)


def meet_ring(
    q: Array,
    entries: Cache,
    past: Cache,
    before: Int[Array, "B"],
    at: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    read: Read,
    score: Score,
    absorb: bool | None,
) -> Array:
    """Attention on rings with `before` tokens, and on the new tokens.

    Args:
        past: the rings before this call, by plain name.
    """
    size = next(iter(past.values())).shape[1]
    if score.window is None or score.window > size + 1:
        raise ValueError(f"a ring of {size} tokens cannot serve a window of {score.window}")
    both, k_at = rings_with_new(past, entries, before, at, live, q.dtype)
    return meet(q, both, read, score, See(at, k_at), absorb)


def _strategy(*static: str) -> Any:
    """A frozen dataclass that is a pytree; `static` names the fields that are not arrays."""

    def wrap(cls: type) -> type:
        cls = dataclass(frozen=True)(cls)
        arrays = [f.name for f in fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, arrays, list(static))

    return wrap


@_strategy("absorb")
class Packed(RowRecurrence):
    """Whole sequences, causal within each segment; segment 0 is padding. For training and for evaluating whole texts."""

    segments: Int[Array, "B T"]
    absorb: bool | None = None
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at, segments = row_places(self.segments), window_segments(self.segments, score)
        see = See(at, at, segments, segments, aligned=True)
        return meet(q, entries, read, score, see, self.absorb), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy()
class Branched:
    """Sequences that begin alike, with what they share computed once: a tree of segments, causal along each branch. Segment 0 is
    padding (arXiv:2506.05433).

    segments: of each token.
    prefixes: the segment that comes before the token's own, 0: none; it stands earlier in the row, and has no prefix itself.
    at: positions, counted from the start of the prefix.
    """

    segments: Int[Array, "B T"]
    prefixes: Int[Array, "B T"]
    at: Int[Array, "B T"]
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.at

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        rows, whose = row_places(self.segments), (self.segments, self.segments)
        see = See(rows, rows, *whose, aligned=True, q_prefix=self.prefixes)
        if score.window is not None and score.window >= q.shape[1]:
            score = replace(score, window=None)
        elif score.window is not None:
            # Places in the row are no distances between tokens of different segments.
            see = replace(see, q_at=self.at, k_at=self.at, aligned=False)
            chunk = self.at // score.window
            see = replace(see, picked=chunk[:, :, None] == chunk[:, None, :]) if score.chunked else see
        return meet(q, entries, read, score, see, None), cache

    def recur(self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        raise Unsupported("a recurrent layer, in a row whose sequences share how they begin")


@_strategy("whole")
class Bidirectional(RowRecurrence):
    """Each token attends to its whole segment; segment 0 is padding.

    whole: each row is one segment without padding, so nothing is masked.
    """

    segments: Int[Array, "B T"]
    angles: Angled = None
    whole: bool = False

    @classmethod
    def whole_rows(cls: Any, rows: Any, tokens: Any) -> "Bidirectional":
        """Every token attends to all of its row. The sizes may be symbolic, in an export."""
        return cls(jnp.ones((rows, tokens), jnp.int32), whole=True)

    @property
    def positions(self) -> Int[Array, "B T"]:
        return segment_positions(self.segments)

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        at = row_places(self.segments)
        segments = None if self.whole and not score.chunked else window_segments(self.segments, score)
        see = See(at, at, segments, segments, causal=False, aligned=True)
        return meet(q, entries, read, score, see, False), cache

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(None, segment_starts(self.segments), self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache


@_strategy("absorb", "fresh")
class Contiguous(RowRecurrence):
    """A buffer [B S ...] for each layer. Token t of row b is at `at[b, t]`. Tokens that are not `live` (padding on the right of
    shorter rows) and positions outside the buffer are not written, and their results have no meaning.

    fresh: these are the first tokens, `at` is 0..T-1. They then attend only to each other, as in training, and not to the whole
    buffer: scores are [T T] and causal instead of [T S] and dense.
    """

    at: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    absorb: bool | None = None
    fresh: bool = False
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.at

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Contiguous writes to a cache: allocate one with `contiguous`"
        B, past = q.shape[0], cache
        if is_ring(cache, entries):
            cache = with_tokens(cache, jnp.arange(B), entries, self.at, self.live)
            if self.fresh:
                return self._fresh(q, entries, read, score), cache
            before = jnp.where(self.live[:, 0], self.at[:, 0], 0)
            rings = {n: past[RING + n] for n in entries}
            return meet_ring(q, entries, rings, before, self.at, self.live, read, score, self.absorb), cache
        row, S = jnp.arange(B)[:, None], cache[next(iter(entries))].shape[1]
        where = nobodys(jnp.where(self.live, self.at, S), S)
        updated = {n: cache[n].at[row, where].set(new.astype(cache[n].dtype), mode="drop") for n, new in entries.items()}
        cache = cache | updated
        if self.fresh:
            return self._fresh(q, entries, read, score), cache
        k_at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        length = 1 + jnp.max(jnp.where(self.live, self.at, -1), 1, keepdims=True)
        stored = {n: zero_unowned(cache[n], k_at < length).astype(q.dtype) for n in entries}
        return meet(q, stored, read, score, See(self.at, k_at), self.absorb), cache

    def _fresh(self, q: Array, entries: Cache, read: Read, score: Score) -> Array:
        return meet(q, entries, read, score, See(self.at, self.at, aligned=True), self.absorb)

    def carry(self, cache: Cache | None) -> Carry:
        return Carry(cache and row_states(cache), self.at == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        return cache and cache | {ROW + n: new.astype(cache[ROW + n].dtype) for n, new in state.items()}


def zero_unowned(a: Array, mask: Bool[Array, "B S"]) -> Array:
    """An array [B S ...] with zeros where the row has no tokens: a previous owner may have left NaN there, and zero times NaN is
    NaN."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - 2)), a, jnp.zeros((), a.dtype))


def _parted(entries: Cache, size: int) -> Cache:
    """What was gathered from pools, by the layer's own names.

    Args:
        size: of heads of keys and values, which joined pools may fill up.
    """
    return dict(zip("kv", keys_and_values([entries[JOINED][..., :size]]))) if JOINED in entries else entries


@_strategy("absorb")
class Paged(RowRecurrence):
    """Row b owns the pages `table[b]` of a pool [pages page ...] and the slot `slots[b]` of rings and states. It has `lengths[b]`
    tokens, and `new[b]` of the T tokens of this call are its new ones.

    A slot or page out of range, including -1, belongs to no row: nothing is read from it, and writes to it are dropped, as are
    those of tokens beyond the row's table. What a previous owner left in a page or slot may be anything, including NaN.

    Keys and values of this call are written first and then read like all others, so in a quantized pool an answer does not depend on
    how a prompt was cut into calls.
    """

    # Arrays, or descriptions of them (`ops.programs.programs`).
    table: Int[Any, "B P"]
    slots: Int[Any, "B"]
    lengths: Int[Any, "B"]
    new: Int[Any, "B"]
    # 0..T-1 in each row, so that the number of tokens is known from an array with the batch as leading axis.
    t: Int[Any, "B T"]
    absorb: bool | None = None
    angles: Angled = None
    # For the pools of windows: the number of the first page that a row keeps there [B], and from it on its pages [B W].
    windows: Mapping[AttentionWindow, tuple[Int[Any, "B"], Int[Any, "B W"]]] = field(default_factory=dict)

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.lengths[:, None] + self.t

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.t < self.new[:, None]

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        assert cache is not None, "Paged writes to a pool: allocate one with `empty_pools`"
        at = self.positions
        if is_ring(cache, entries):
            rings = {n: jnp.take(cache[RING + n], self.slots, axis=0, mode="clip") for n in entries}
            y = meet_ring(q, entries, rings, self.lengths, at, self.live, read, score, self.absorb)
            return y, with_tokens(cache, self.slots, entries, at, self.live)
        cache = self.write(entries, cache, score)
        return self.attend(q, entries, cache, read, score), cache

    def in_stack(self, cache: Cache, at: Int[Array, ""]) -> "Paged":
        """The strategy for layer `at` of a stacked cache [layers ...] whose layers are joined (`cache.joined_layers`): its pages and
        slots come after those of earlier layers."""
        counts = entry_counts(cache)

        def shifted(index: Int[Any, "*B"], kind: str) -> Int[Any, "*B"]:
            count = counts.get(kind, 0)
            return jnp.where((index >= 0) & (index < count), index + at * count, -1)

        windows = {window: (first, shifted(table, WINDOW)) for window, (first, table) in self.windows.items()}
        table, slots = shifted(self.table, ""), shifted(self.slots, ROW)
        return Paged(table, slots, self.lengths, self.new, self.t, self.absorb, self.angles, windows)

    def write(self, entries: Cache, cache: Cache, score: Score) -> Cache:
        """The pools with the tokens of this call. Not for rings."""
        strategy, prefix, pools = self._pools(entries, cache, score)
        if JOINED in pools:
            entries = {JOINED: with_longer_heads(join_heads(entries["k"], entries["v"]), pools[JOINED].shape[-1])}
        where = strategy._places(*next(iter(pools.values())).shape[:2])
        return cache | {prefix + n: write_entries(pools[n], where, new) for n, new in entries.items()}

    def attend(self, q: Array, entries: Cache, cache: Cache, read: Read, score: Score) -> Array:
        """Attention over pools to which the tokens of this call were written.

        Args:
            entries: for its names.
        """
        strategy, _, pools = self._pools(entries, cache, score)
        total = strategy.lengths + strategy.new
        if read is HEADS and not score.chunked:
            both = (pools[JOINED],) if JOINED in pools else (pools["k"], pools["v"])
            return paged_attention(q, both, strategy.table, total, strategy.positions, score)
        return strategy._attend_through(q, pools, total, read, score)

    def _pools(self, entries: Cache, cache: Cache, score: Score) -> tuple["Paged", str, Cache]:
        """The strategy for a layer's pools, what their names in the cache begin with, and the pools by plain name."""
        strategy, prefix = self, ""
        if is_windowed(cache, entries):
            prefix = WINDOW
            page = next(a for name, a in cache.items() if name.startswith(WINDOW)).shape[1]
            strategy = self._in_window(score, page)
        names = (JOINED,) if prefix + JOINED in cache else tuple(entries)
        return strategy, prefix, {name: cache[prefix + name] for name in names}

    def _in_window(self, score: Score, page: int) -> "Paged":
        """The strategy for the pools of a window, as if sequences began where their pages there begin: what a query sees depends on
        distances alone. Chunks begin with a page."""
        assert score.window is not None
        assert not (score.chunked and score.window % page)
        first, table = self.windows[AttentionWindow(score.window, score.chunked)]
        return Paged(table, self.slots, self.lengths - first * page, self.new, self.t, self.absorb)

    def _attend_through(self, q: Array, pools: Cache, total: Int[Array, "B"], read: Read, score: Score) -> Array:
        """Attention through a `Read`: over a block of pages at a time, unless the read must see all tokens at once."""
        at = self.positions
        pages, page = next(iter(pools.values())).shape[:2]
        if read.narrows or fits_one_block(self.table, page):
            mine = {n: gather_pages(pool, self.table, total).astype(q.dtype) for n, pool in pools.items()}
            see = See(at, token_positions(self.table, total, pages, page))
            return meet(q, _parted(mine, q.shape[-1]), read, score, see, self.absorb)
        plain = replace(score, sinks=None)

        def attend(entries: Cache, see: See) -> tuple[Array, Array]:
            entries = {n: a.astype(q.dtype) for n, a in entries.items()}
            return meet(q, _parted(entries, q.shape[-1]), read, plain, see, self.absorb, lse=True)

        return attend_by_blocks(attend, pools, self.table, total, at, score)[0].astype(q.dtype)

    def _places(self, pages: int, page: int) -> tuple[Array, Array]:
        """Page and place of each token; past the last page for tokens that are not new."""
        P = self.table.shape[1]
        number = self.positions // page
        page_ids = jnp.take_along_axis(self.table, jnp.clip(number, 0, P - 1), axis=1)
        mine = self.live & (number >= 0) & (number < P)
        return jnp.where(mine, nobodys(page_ids, pages), pages), self.positions % page

    def carry(self, cache: Cache | None) -> Carry:
        state = cache and {n: jnp.take(p, self.slots, axis=0, mode="clip") for n, p in row_states(cache).items()}
        return Carry(state, self.positions == 0, self.live)

    def keep(self, cache: Cache | None, state: Cache) -> Cache | None:
        if cache is None:
            return None
        out = dict(cache)
        for n, new in state.items():
            pool = cache[ROW + n]
            out[ROW + n] = pool.at[nobodys(self.slots, len(pool))].set(new.astype(pool.dtype), mode="drop")
        return out
