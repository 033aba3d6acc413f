"""The caches of layers: buffers, page pools, rings and recurrent states.

A layer declares what it caches (`Spec`), the caller allocates the arrays (`contiguous`, `empty_pools`), and the strategies of
`parts.attention.attend` read and write them. An entry has one of four kinds. The kind is part of the array's name in a layer's cache:

    "k"          token   one entry per token, in a buffer for each row or in pages of a pool
    "ring.k"     ring    one entry for each of the last `span` tokens, for layers with a sliding window
    "window.k"   window  also for layers with a sliding window: pages of a pool, of which a sequence keeps those that the window reaches
    "row.state"  row     one entry per sequence: the state of a recurrent layer

If a kernel of the platform reads keys and values from one pool, keys and values of equal shape share the pool "kv"
(`ops.paged.attention`).

A pool of pages may be quantized. Its entries are then `ops.narrow.Narrow`: eight bits, with a scale for each token and head. Page
tables, copies and rollbacks are the same for quantized pools. Rings and states are never quantized: a ring is as short as its window,
and a state would accumulate the rounding error of every token.

Token p is at index p modulo the size of a ring. Which entries of a ring are valid therefore follows from the length of the sequence,
and a slot need not be cleared for a new owner. With `slack`, a ring holds that many more tokens than its layer attends to, and a
sequence can be rolled back by as many tokens (a rejected draft). Pages and buffers can be rolled back without that. States need a
`snapshot`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from argosy.ops.attention import NOWHERE
from argosy.ops.narrow import Narrow, empty
from argosy.ops.paged.ragged import joined_size
from argosy.ops.precision import sums_in
from argosy.parallel.scope import activation_spec, on_several_devices

# The cache of one layer: arrays, or `Narrow`, by name.
Cache = dict[str, Any]
Kind = Literal["token", "ring", "window", "row"]
RING, WINDOW, ROW = "ring.", "window.", "row."
# The name of a pool that holds both keys and values.
JOINED = "kv"


class CacheEntry(NamedTuple):
    """One array that a layer caches.

    name: the name without the prefix of its kind, such as "k".
    shape: the shape for one token, or for one sequence if the kind is "row".
    dtype: None: the dtype of the whole cache.
    size: the size of a ring, in tokens.
    scales: as in `Spec`.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    dtype: Any = None
    size: int | None = None
    scales: int = 1

    @property
    def key(self) -> str:
        """The name of the array in a layer's cache, with the prefix of its kind."""
        return {"token": "", "ring": RING, "window": WINDOW, "row": ROW}[self.kind] + self.name


class AttentionWindow(NamedTuple):
    """How far back a layer attends.

    tokens: the size of the window, including the query's own token.
    chunked: whether sequences are cut into chunks of `tokens` tokens, and a query attends only to its own chunk.
    """

    tokens: int
    chunked: bool = False

    def first(self, at: int) -> int:
        """Returns the first position that a query at position `at` sees."""
        return at // self.tokens * self.tokens if self.chunked else max(0, at - self.tokens + 1)

    def pages(self, queries: int, page: int) -> int:
        """Returns the most pages that `queries` consecutive queries can see, with `page` tokens per page."""
        return (self.tokens + queries + page - 3) // page + 1


@dataclass(frozen=True)
class Spec:
    """What one layer caches.

    token: (name, shape per token) of each array that has an entry per token.
    row: (name, shape per sequence) of each state. States are float32, because they sum over thousands of tokens.
    span: how many tokens a query attends to at most, including its own. None: all tokens.
    chunked: whether a token attends only within its own chunk of `span` tokens.
    letters: (name, letters of the shape's axes), such as ("k", "K H"), for the rules that split arrays over devices. An array without
        letters is replicated on every device.
    scales: (name, number of scales along the last axis in a quantized cache). 0: the entry is not quantized. Default: 1.
    """

    token: tuple[tuple[str, tuple[int, ...]], ...] = ()
    row: tuple[tuple[str, tuple[int, ...]], ...] = ()
    span: int | None = None
    chunked: bool = False
    letters: tuple[tuple[str, str], ...] = ()
    scales: tuple[tuple[str, int], ...] = ()

    @property
    def window(self) -> AttentionWindow | None:
        return AttentionWindow(self.span, self.chunked) if self.span is not None and self.token else None

    def entries(self, longest: int, slack: int = 0) -> Iterator[CacheEntry]:
        """The arrays for sequences of at most `longest` tokens. Arrays per token are rings if a ring is shorter than `longest`."""
        size = None if self.span is None or self.span + slack >= longest else self.span + slack
        for name, shape in self.token:
            yield CacheEntry(name, shape, "token" if size is None else "ring", None, size, dict(self.scales).get(name, 1))
        for name, shape in self.row:
            yield CacheEntry(name, shape, "row", jnp.float32)


# {cache name: (what one layer caches, the number of layers on the arrays' leading axis; None: there is no such axis)}
Specs = dict[str, tuple[Spec, int | None]]
Caches = dict[str, Cache]


def contiguous(specs: Specs, rows: Any, length: int, dtype: Any = jnp.float32, *, slack: int = 0) -> Caches:
    """Allocates empty caches for `Contiguous`: buffers [rows length ...], rings [rows span + slack ...] and states [rows ...].

    Args:
        rows: the number of rows. In an export, it may be symbolic.
        length: the most tokens of one row.
        slack: how many tokens a sequence may be rolled back.
    """
    return _allocate(specs, (rows, length), rows, dtype, length, slack)


def empty_pools(
    specs: Specs,
    slots: int,
    pages: int,
    page: int,
    dtype: Any = jnp.float32,
    *,
    longest: int | None = None,
    slack: int = 0,
    windows: Mapping[AttentionWindow, int] | None = None,
    narrow: str | None = None,
) -> Caches:
    """Allocates empty caches for `Paged`: pools [pages page ...], rings [slots span + slack ...] and states [slots ...].

    Args:
        slots: the number of slots for rings and states.
        pages: the number of pages.
        page: the number of tokens per page.
        longest: the most tokens of one sequence; layers that attend less far back have rings. Default: all tokens of the pool.
        slack: how many tokens a sequence may be rolled back.
        windows: for some windows, the number of pages in the pools of layers with that window. Layers with other windows have rings, or
            pages like layers without a window.
        narrow: the quantized form of the pools, of `ops.narrow`. None: they are not quantized.
    """
    longest = pages * page if longest is None else longest
    return _allocate(specs, (pages, page), slots, dtype, longest, slack, joined=True, windows=windows or {}, narrow=narrow)


def _allocate(
    specs: Specs,
    token: tuple[Any, int],
    rows: Any,
    dtype: Any,
    longest: int,
    slack: int,
    *,
    joined: bool = False,
    windows: Mapping[AttentionWindow, int] = MappingProxyType({}),
    narrow: str | None = None,
) -> Caches:
    def allocate(spec: Spec, layers: int | None) -> Cache:
        lead = () if layers is None else (layers,)
        place = {"token": token, "row": (rows,)}
        entries = list(spec.entries(longest, slack))
        if (window := spec.window) is not None and window in windows:
            place["window"] = windows[window], token[1]
            entries = [e._replace(kind="window", size=None) if e.kind in ("token", "ring") else e for e in entries]

        def zeros(e: CacheEntry) -> Any:
            shape = (*lead, *place.get(e.kind, (rows, e.size)), *e.shape)
            if narrow and e.kind in ("token", "window") and e.scales:
                return empty(shape, e.scales, narrow)
            return jnp.zeros(shape, dtype if e.dtype is None else sums_in(dtype))

        # Quantized pools are not joined, because no kernel reads scales in a joined pool.
        return {e.key: zeros(e) for e in (_joined(entries, dtype) if joined and not narrow else entries)}

    return {name: allocate(*spec) for name, spec in specs.items()}


def _joined(entries: list[CacheEntry], dtype: Any) -> list[CacheEntry]:
    """Replaces the entries "k" and "v" by one joined entry, if the platform's kernels read joined pools."""
    paged_ = [e for e in entries if e.kind in ("token", "window")]
    tokens = {e.name: e.shape for e in paged_}
    if set(tokens) != {"k", "v"} or tokens["k"] != tokens["v"]:
        return entries
    heads, size = tokens["k"]
    filled = joined_size(heads, size, dtype)
    if filled is None:
        return entries
    return [CacheEntry(JOINED, (2 * heads, filled), paged_[0].kind), *(e for e in entries if e not in paged_)]


def layouts(specs: Specs, caches: Any) -> dict[str, dict[str, Any]]:
    """The partition specs of these caches, or of their shapes, over the mesh in scope."""

    def narrow(spec: PartitionSpec, a: Narrow) -> Narrow:
        """Splits scales as heads are split, so that a head's scales are on the head's device."""
        return replace(a, bits=spec, scale=PartitionSpec(*spec[:-1], None))

    def layout(key: str, shape: tuple[int, ...], letters: Mapping[str, str], heads: int) -> PartitionSpec:
        name = key.split(".")[-1]
        axis_letters = letters.get("k" if name == JOINED else name, "").split()
        whole = (None,) * (len(shape) - len(axis_letters))
        # A joined pool is split between heads, never between a head's keys and values.
        sizes = shape[len(whole) :] if name != JOINED else (heads, *shape[len(whole) + 1 :])
        return PartitionSpec(*whole, *activation_spec(" ".join(axis_letters), sizes))

    def of(spec: Spec, cache: Mapping[str, Any]) -> dict[str, Any]:
        letters, shapes = dict(spec.letters), dict(spec.token)
        heads = shapes["k"][0] if "k" in shapes else 0
        places = {key: layout(key, a.shape, letters, heads) for key, a in cache.items()}
        return {key: narrow(places[key], a) if isinstance(a, Narrow) else places[key] for key, a in cache.items()}

    return {name: of(specs[name][0], cache) for name, cache in caches.items()}


def constrain_caches(specs: Specs, caches: Caches) -> Caches:
    """Constrains the sharding of these caches to `layouts`."""
    return jax.tree.map(jax.lax.with_sharding_constraint, caches, layouts(specs, caches))


def is_ring(cache: Cache, entries: Cache) -> bool:
    """Whether a layer's cache keeps these entries in rings."""
    return all(RING + name in cache for name in entries)


def is_windowed(cache: Cache, entries: Cache) -> bool:
    """Whether a layer's cache keeps these entries in pages of a window."""
    return any(WINDOW + name in cache for name in (*entries, JOINED))


def row_states(cache: Cache) -> Cache:
    """The entries per sequence (states), by name without prefix."""
    return {key.removeprefix(ROW): a for key, a in cache.items() if key.startswith(ROW)}


# ---------------------------------------------------------------- stacked layers


def joined_layers(cache: Cache) -> Cache:
    """Merges the first two axes of a stacked cache: [layers pages ...] becomes [layers * pages ...].

    A kernel can read one layer's pages there in place. A layer sliced out of the stack would be copied, and copied back.
    """
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), cache)


def parted_layers(cache: Cache, layers: int) -> Cache:
    """The inverse of `joined_layers`."""
    return jax.tree.map(lambda a: a.reshape(layers, -1, *a.shape[1:]), cache)


def entry_counts(cache: Cache) -> dict[str, int]:
    """Counts what one layer of a stacked cache has: pages by key `""`, pages of a window by `WINDOW`, and slots by `ROW`."""
    counts: dict[str, int] = {}
    for key, entry in cache.items():
        kind = key.partition(".")[0] + "." if "." in key else ""
        counts[ROW if kind == RING else kind] = jax.tree.leaves(entry)[0].shape[1]
    return counts


# ---------------------------------------------------------------- copying and rolling back sequences


def snapshot(specs: Specs, caches: Caches, rows: Int[Array, "B"]) -> Caches:
    """Copies the rings and states of these sequences, which cannot be rolled back by changing a length.

    Args:
        rows: the sequences' rows in buffers, or slots in pools. For values out of range, including -1, the copies have no meaning.
    """

    def copied(name: str, cache: Cache) -> Cache:
        axis = int(specs[name][1] is not None)
        return {
            key: jnp.take(a, jnp.clip(rows, 0, a.shape[axis] - 1), axis)
            for key, a in cache.items()
            if key.startswith((RING, ROW))
        }

    return {name: copied(name, cache) for name, cache in caches.items()}


def restore(specs: Specs, caches: Caches, copies: Caches, rows: Int[Array, "B"]) -> Caches:
    """Writes copies of `snapshot` back, to roll sequences back or to resume them in other rows. Returns the new caches.

    Args:
        copies: the result of `snapshot`, for as many sequences as `rows` has.
        rows: the row or slot that each copy is written to. A copy for a row out of range, including -1, is dropped.
    """

    def restored(name: str, cache: Cache) -> Cache:
        stacked = specs[name][1] is not None
        out = dict(cache)
        for key, copy in copies[name].items():
            a = out[key]
            where = nobodys(rows, a.shape[int(stacked)])
            out[key] = (a.at[:, where] if stacked else a.at[where]).set(copy.astype(a.dtype), mode="drop")
        return out

    return {name: restored(name, cache) for name, cache in caches.items()}


def with_pages_copied(specs: Specs, caches: Caches, pages: Int[Array, "B"], to: Int[Array, "B"]) -> Caches:
    """Copies pages within the pools, and returns the new caches. All pages are read before any is written.

    Args:
        pages: the pages to copy.
        to: the page that each is copied to. A copy to a page out of range, including -1, is dropped.
    """

    def with_copies(name: str, cache: Cache) -> Cache:
        stacked = specs[name][1] is not None

        def copied(a: Array) -> Array:
            count = a.shape[int(stacked)]
            rows = jnp.take(a, jnp.clip(pages, 0, count - 1), int(stacked))
            where = nobodys(to, count)
            return (a.at[:, where] if stacked else a.at[where]).set(rows, mode="drop")

        return jax.tree.map(copied, cache)

    new_caches = {name: with_copies(name, cache) for name, cache in caches.items()}
    return constrain_caches(specs, new_caches) if on_several_devices() else new_caches


def nobodys(index: Int[Array, "*B"], size: int) -> Int[Array, "*B"]:
    """Replaces indexes that are out of range by `size`, so that `mode="drop"` drops them. Negative indexes would wrap around."""
    return jnp.where((index >= 0) & (index < size), index, size)


# ---------------------------------------------------------------- rings


def with_tokens(
    cache: Cache, rows: Int[Array, "B"], entries: Cache, at: Int[Array, "B T"], live: Bool[Array, "B T"]
) -> Cache:
    """Writes tokens to rings, and returns the new cache. If there are more tokens than the ring has places, only the last are written.

    Args:
        rows: the row or slot of each sequence.
        entries: the arrays of the new tokens, by name without prefix.
        at: the positions of the new tokens.
        live: which of them are real. The others are not written.
    """
    out = dict(cache)
    for name, new in entries.items():
        ring = cache[RING + name]
        size = ring.shape[1]
        last = jnp.max(jnp.where(live, at, -1), 1, keepdims=True)
        where = jnp.where(live & (at > last - size), at % size, size)
        out[RING + name] = ring.at[nobodys(rows, len(ring))[:, None], where].set(new.astype(ring.dtype), mode="drop")
    return out


def rings_with_new(
    past: Cache, entries: Cache, before: Int[Array, "B"], at: Int[Array, "B T"], live: Bool[Array, "B T"], dtype: Any
) -> tuple[Cache, Int[Array, "B S"]]:
    """Concatenates the entries of rings with those of the new tokens. Also returns the position of each entry.

    With this, a call may have any number of new tokens, and the ring need not be larger than the window. Entries that belong to no
    token are set to zero.

    Args:
        past: the rings before the new tokens are written, by name without prefix.
        entries: the arrays of the new tokens.
        before: the number of tokens of each row before the new ones.
    """
    size = next(iter(past.values())).shape[1]
    newest = before[:, None] - 1
    # The position of the token in each entry of the ring.
    old = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size
    k_at = jnp.concatenate([jnp.where(old >= 0, old, NOWHERE), jnp.where(live, at, NOWHERE)], 1)

    def joined(name: str) -> Array:
        valid = (old >= 0).reshape(*old.shape, *(1,) * (past[name].ndim - 2))
        ring = jnp.where(valid, past[name], jnp.zeros((), past[name].dtype))
        return jnp.concatenate([ring.astype(dtype), entries[name].astype(dtype)], 1)

    return {name: joined(name) for name in entries}, k_at


def bytes_of_caches(caches: Any) -> int:
    """The size in bytes of all arrays of these caches. Shapes may stand for arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches))
