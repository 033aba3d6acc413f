"""Seam 2: attention strategies. They decide which keys a query attends to, where keys and values are cached, and how recurrent states
are carried.

A layer declares what it caches, `holds() -> Spec`, and the caller allocates those arrays (`contiguous`, `empty_pools`). The layer then
calls

    y, cache = attend(q, entries, cache, read, score)       attention
    y, cache = attend.recur(step, inputs, cache)         recurrence: step(inputs, carry) -> y, state

and reads `attend.positions` for rope. The same model trains, prefills and decodes; only the strategy differs. A strategy is a pytree
whose arrays all have the batch as leading axis, so devices and pipeline stages can split rows without knowing the strategy.

    Packed(segments)                        training: whole sequences, several to a row
    Branched(segments, prefixes, at)        training: the same, with a prefix that several sequences share
    Contiguous(at, live)                    evaluation and decoding: one KV buffer for each row, rows of any length
    Paged(table, slots, lengths, new, t)    serving: rows own KV-cache pages of a pool (Kwon et al. 2023, arXiv:2309.06180)
    Ragged(groups)                          serving: rows with different numbers of new tokens (`parts.attention.ragged`)
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

# Cosines and sines of the tokens' rotary angles, by `Rope.key`. A stack computes them once for all its layers.
Angled = dict[str, Any] | None


@runtime_checkable
class Read(Protocol):
    """Converts cached arrays to keys and values."""

    def expand(self, entries: Cache) -> tuple[Array, Array]:
        """Computes keys [B S K H] and values [B S K U] from cached arrays."""
        ...

    def absorb(self, q: Array, entries: Cache) -> tuple[Array, Array, Array] | None:
        """Maps queries into the space of the cached arrays. Returns queries, keys and values that give the same scores as the expanded
        form. None: this kind of cache has no such form."""
        ...

    def release(self, y: Array) -> Array:
        """Maps an output of attention in the space of the cached arrays back to heads."""
        ...

    @property
    def narrows(self) -> bool:
        """Whether `narrow` restricts queries to some tokens. If so, `narrow` needs the cached arrays of all tokens at once."""
        ...

    def narrow(self, entries: Cache, see: See, window: int | None) -> See:
        """Restricts which tokens each query attends to, from the cached arrays (sparse attention)."""
        ...

    def multiplications(self, T: int, S: int) -> tuple[int, int]:
        """Counts the multiplications per row for T queries and S cached tokens: of the expanded form, and of the absorbed form."""
        ...

    def of_rows(self, cut: Callable[[Array], Array]) -> "Read":
        """Returns this `Read` for some rows of the call. `cut` takes the part of those rows out of an array with all tokens."""
        ...


class Heads:
    """A `Read` for caches that hold keys and values themselves."""

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
    """The interface of attention strategies."""

    @property
    def positions(self) -> Int[Array, "B T"]:
        """The positions of this call's tokens, each counted from the start of the token's own sequence."""
        ...

    @property
    def live(self) -> Bool[Array, "B T"]:
        """Which tokens are real. The results for other tokens, such as padding, have no meaning."""
        ...

    def __call__(
        self, q: Float[Array, "B T N H"], entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score
    ) -> tuple[Float[Array, "B T N U"], Cache | None]: ...

    def recur(
        self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None
    ) -> tuple[Array, Cache | None]: ...


@runtime_checkable
class StackedAttend(Attend, Protocol):
    """A strategy that indexes pages and slots by number, so it can also index one layer's in a cache of all layers.

    `in_stack` returns the strategy for layer `at` of a stacked cache (see `Paged.in_stack`).
    """

    def in_stack(self, cache: Cache, at: Int[Array, ""]) -> Attend: ...


def meet(
    q: Array, entries: Cache, read: Read, score: Score, see: See, absorb: bool | None, *, lse: bool = False
) -> Any:
    """Computes attention over cached arrays, in expanded or absorbed form (`Read`).

    Args:
        absorb: whether to use the absorbed form. None: the form with fewer multiplications.
        lse: whether to return a pair of the output and the log-sum-exp of the scores, instead of the output only.
    """
    if score.chunked and score.window and see.q_segment is None:
        see = replace(see, q_segment=see.q_at // score.window, k_segment=see.k_at // score.window)
    see = read.narrow(entries, see, score.window)
    T, S = q.shape[1], see.k_at.shape[1]
    if absorb is None and not (isinstance(T, int) and isinstance(S, int)):
        # In an export with symbolic lengths, multiplications cannot be counted.
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
    """Computes attention over the cached tokens of rings and over the new tokens of this call.

    Args:
        entries: the arrays of the new tokens, by name.
        past: the rings before this call, by name without prefix.
        before: the number of tokens of each row before this call.
        at: the positions of the new tokens.
        live: which of the new tokens are real.
        absorb: as in `meet`.

    Raises:
        ValueError: the layer has no window, or one that is too long for the ring.
    """
    size = next(iter(past.values())).shape[1]
    if score.window is None or score.window > size + 1:
        raise ValueError(f"a ring of {size} tokens cannot serve a window of {score.window}")
    both, k_at = rings_with_new(past, entries, before, at, live, q.dtype)
    return meet(q, both, read, score, See(at, k_at), absorb)


def _strategy(*static: str) -> Any:
    """A class decorator: makes a frozen dataclass that is a pytree. `static` names the fields that are not arrays."""

    def wrap(cls: type) -> type:
        cls = dataclass(frozen=True)(cls)
        arrays = [f.name for f in fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, arrays, list(static))

    return wrap


@_strategy("absorb")
class Packed(RowRecurrence):
    """Whole sequences, causal within each segment. For training and for evaluating whole texts.

    segments: the segment of each token. 0 is padding.
    absorb: as in `meet`.
    """

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
    """Sequences that share a prefix, which is computed once (arXiv:2506.05433). A token attends causally to its own segment, and to the
    whole prefix segment.

    segments: the segment of each token. 0 is padding.
    prefixes: for each token, the segment that is the prefix of the token's own segment; 0 for none. The prefix stands earlier in the
        row, and has no prefix itself.
    at: the position of each token, counted from the start of the prefix.
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
            # Between tokens of different segments, the distance in the row is not the distance in the sequence.
            see = replace(see, q_at=self.at, k_at=self.at, aligned=False)
            chunk = self.at // score.window
            see = replace(see, picked=chunk[:, :, None] == chunk[:, None, :]) if score.chunked else see
        return meet(q, entries, read, score, see, None), cache

    def recur(self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        raise Unsupported("a recurrent layer, in a row whose sequences share how they begin")


@_strategy("whole")
class Bidirectional(RowRecurrence):
    """Each token attends to its whole segment.

    segments: the segment of each token. 0 is padding.
    whole: whether each row is one segment without padding, so that no mask is needed.
    """

    segments: Int[Array, "B T"]
    angles: Angled = None
    whole: bool = False

    @classmethod
    def whole_rows(cls: Any, rows: Any, tokens: Any) -> "Bidirectional":
        """The strategy in which every token attends to its whole row. In an export, the two sizes may be symbolic."""
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
    """Caches keys and values in one buffer [B S ...] for each layer.

    at: the position of each token, which is its index along S.
    live: which tokens are real; shorter rows are padded on the right. Tokens that are not live or lie outside the buffer are not
        written, and their results have no meaning.
    absorb: as in `meet`.
    fresh: whether these are the first tokens of their rows, with `at` 0..T-1. They then attend only to each other, as in training:
        scores are [T T] and causal instead of [T S] and dense.
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
    """Sets an array [B S ...] to zero where the mask is false. Positions without a token may hold NaN of a previous owner, and zero
    times NaN is NaN."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - 2)), a, jnp.zeros((), a.dtype))


def _parted(entries: Cache, size: int) -> Cache:
    """Splits a joined pool's entries into "k" and "v". Other entries are returned unchanged.

    Args:
        size: the head size of keys and values. Joined pools may pad heads.
    """
    return dict(zip("kv", keys_and_values([entries[JOINED][..., :size]]))) if JOINED in entries else entries


@_strategy("absorb")
class Paged(RowRecurrence):
    """Caches keys and values in pages of a pool [pages page ...], and rings and states in slots.

    table: the KV-cache pages that each row owns, in order.
    slots: the slot of each row's rings and states.
    lengths: the number of cached tokens of each row before this call.
    new: how many of the T tokens of this call are new tokens of the row. The others are padding.

    A slot or page out of range, including -1, belongs to no row: nothing is read from it, and writes to it are dropped. Tokens beyond
    the row's table are not written either. A page or slot may hold anything of a previous owner, including NaN.

    Keys and values of this call are written first and then read like all others. In a quantized pool, results therefore do not depend
    on how a prompt was split into calls.
    """

    # Arrays, or descriptions of arrays (`ops.programs.programs`).
    table: Int[Any, "B P"]
    slots: Int[Any, "B"]
    lengths: Int[Any, "B"]
    new: Int[Any, "B"]
    # 0..T-1 in each row: an array with the batch as leading axis, from whose shape T is known.
    t: Int[Any, "B T"]
    absorb: bool | None = None
    angles: Angled = None
    # For the pools of each window: the index of the first page that a row keeps of its sequence [B], and the row's pages from there on
    # [B W].
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
        """Returns the strategy for layer `at` of a stacked cache [layers ...].

        The strategy indexes the cache after `joined_layers`, where a layer's pages and slots come after those of earlier layers.
        """
        counts = entry_counts(cache)

        def shifted(index: Int[Any, "*B"], kind: str) -> Int[Any, "*B"]:
            count = counts.get(kind, 0)
            return jnp.where((index >= 0) & (index < count), index + at * count, -1)

        windows = {window: (first, shifted(table, WINDOW)) for window, (first, table) in self.windows.items()}
        table, slots = shifted(self.table, ""), shifted(self.slots, ROW)
        return Paged(table, slots, self.lengths, self.new, self.t, self.absorb, self.angles, windows)

    def write(self, entries: Cache, cache: Cache, score: Score) -> Cache:
        """Writes the tokens of this call to the pools, and returns the new cache. Not for rings."""
        strategy, prefix, pools = self._pools(entries, cache, score)
        if JOINED in pools:
            entries = {JOINED: with_longer_heads(join_heads(entries["k"], entries["v"]), pools[JOINED].shape[-1])}
        where = strategy._places(*next(iter(pools.values())).shape[:2])
        return cache | {prefix + n: write_entries(pools[n], where, new) for n, new in entries.items()}

    def attend(self, q: Array, entries: Cache, cache: Cache, read: Read, score: Score) -> Array:
        """Computes attention over pools that the tokens of this call were already written to.

        Args:
            entries: the arrays of the new tokens. Only their names are read.
        """
        strategy, _, pools = self._pools(entries, cache, score)
        total = strategy.lengths + strategy.new
        if read is HEADS and not score.chunked:
            both = (pools[JOINED],) if JOINED in pools else (pools["k"], pools["v"])
            return paged_attention(q, both, strategy.table, total, strategy.positions, score)
        return strategy._attend_through(q, pools, total, read, score)

    def _pools(self, entries: Cache, cache: Cache, score: Score) -> tuple["Paged", str, Cache]:
        """Returns the strategy for a layer's pools, the prefix of their names in the cache, and the pools by name without prefix."""
        strategy, prefix = self, ""
        if is_windowed(cache, entries):
            prefix = WINDOW
            page = next(a for name, a in cache.items() if name.startswith(WINDOW)).shape[1]
            strategy = self._in_window(score, page)
        names = (JOINED,) if prefix + JOINED in cache else tuple(entries)
        return strategy, prefix, {name: cache[prefix + name] for name in names}

    def _in_window(self, score: Score, page: int) -> "Paged":
        """Returns the strategy for the pools of a window, where positions are counted from the first page that a row keeps.

        This changes no result: which keys a query sees depends on distances only, and a chunk begins at the start of a page.
        """
        assert score.window is not None
        assert not (score.chunked and score.window % page)
        first, table = self.windows[AttentionWindow(score.window, score.chunked)]
        return Paged(table, self.slots, self.lengths - first * page, self.new, self.t, self.absorb)

    def _attend_through(self, q: Array, pools: Cache, total: Int[Array, "B"], read: Read, score: Score) -> Array:
        """Computes attention through a `Read`, one block of pages at a time, unless the `Read` needs all tokens at once."""
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
        """Returns the page of each token and the index within that page. Tokens that are not new get page `pages`, out of range."""
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
