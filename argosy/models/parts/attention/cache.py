"""What layers cache, and where: buffers, pools, rings, states.

A layer declares it (`Spec`), the caller allocates it (`contiguous`, `empty_pools`), and the strategies of `parts.attention.attend` read
and write it. An entry is of one of four kinds, which is part of its array's name in a layer's cache:

    "k"          token   one per token: a buffer for each row, or pages of a pool
    "ring.k"     ring    one for each of the last `span` tokens, for layers that attend no further back (a window)
    "window.k"   window  for the same layers, pages of a pool of which a sequence keeps those that its window still reaches
    "row.state"  row     one per sequence: the state of a recurrent layer

Keys and values of one shape may share a pool, `"kv"`, where a kernel of the platform reads them so (`ops.paged.attention`).

A pool of pages may be quantized: then its entries are `ops.narrow.Narrow`, in eight bits with a scale for each token and head, so that
page tables, copies and rollbacks need to know nothing of it. Rings and states keep their type: a ring is as short as its window, and a
state sums over all tokens, with the rounding of each.

Token p is at p modulo the size of a ring, so the contents of a ring follow from the length of its sequence alone, and a slot need
not be cleared for a new owner. With `slack`, a ring has that many more tokens than its layer attends to: a sequence can then be
rolled back by as many (a rejected draft) and resumed. Pages and buffers need nothing for that, states need a `snapshot`.
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

# Of one layer: arrays, or `Narrow`.
Cache = dict[str, Any]
Kind = Literal["token", "ring", "window", "row"]
RING, WINDOW, ROW = "ring.", "window.", "row."
# The pool of keys and values together.
JOINED = "kv"


class CacheEntry(NamedTuple):
    """One array that a layer caches: its name, the shape for one token or sequence, and its kind.

    dtype: None: the type of the whole cache.
    size: of a ring, in tokens.
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
        """Its name in the cache of a layer."""
        return {"token": "", "ring": RING, "window": WINDOW, "row": ROW}[self.kind] + self.name


class AttentionWindow(NamedTuple):
    """How far back a layer attends: to the last `tokens` tokens, the query's own included.

    tokens: their number.
    chunked: only to tokens of the query's own chunk; sequences are cut every `tokens` tokens.
    """

    tokens: int
    chunked: bool = False

    def first(self, at: int) -> int:
        """The first position that a query at this position sees."""
        return at // self.tokens * self.tokens if self.chunked else max(0, at - self.tokens + 1)

    def pages(self, queries: int, page: int) -> int:
        """The most pages that so many queries in a row see."""
        return (self.tokens + queries + page - 3) // page + 1


@dataclass(frozen=True)
class Spec:
    """What one layer caches: (name, shape) of the arrays per token and per sequence, and how many tokens back it attends,
    including the token itself (None: all of them). States are float32 at least, because they sum over thousands of tokens.

    chunked: a token attends only within its own chunk of `span` tokens.
    letters: of the shapes, such as ("k", "K H"), for the rules that split arrays over devices. An array without letters is whole on
    every device.
    scales: by entry, how many scales its last axis has in a quantized cache. Entries that are not named have 1; with 0 an entry is not
        quantized.
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
        """Its arrays, for sequences of at most `longest` tokens; rings if these are shorter."""
        size = None if self.span is None or self.span + slack >= longest else self.span + slack
        for name, shape in self.token:
            yield CacheEntry(name, shape, "token" if size is None else "ring", None, size, dict(self.scales).get(name, 1))
        for name, shape in self.row:
            yield CacheEntry(name, shape, "row", jnp.float32)


# {cache name: what one layer caches, and how many layers share the arrays}
Specs = dict[str, tuple[Spec, int | None]]
Caches = dict[str, Cache]


def contiguous(specs: Specs, rows: Any, length: int, dtype: Any = jnp.float32, *, slack: int = 0) -> Caches:
    """Empty buffers for `Contiguous`: [rows length ...] per token, [rows span ...] for rings, [rows ...] for states.

    Args:
        rows: their number, which an export may leave open.
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
    """Empty pools for `Paged`: [pages page ...] per token, [slots span ...] for rings, [slots ...] for states.

    Args:
        longest: the most tokens of one sequence; layers that attend less far back have rings. The whole pool by default.
        slack: how many tokens a sequence may be rolled back.
        windows: the number of pages in the pools of layers with these windows. Layers with other windows have rings, or pages like
            layers without a window.
        narrow: the pools are quantized, in this form of `ops.narrow`.
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

        # No kernel reads scales in a joined pool.
        return {e.key: zeros(e) for e in (_joined(entries, dtype) if joined and not narrow else entries)}

    return {name: allocate(*spec) for name, spec in specs.items()}


def _joined(entries: list[CacheEntry], dtype: Any) -> list[CacheEntry]:
    """The entries with keys and values as one, where kernels read them so."""
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
    """How the rules split these caches, or shapes of them, over the mesh in scope."""

    def narrow(spec: PartitionSpec, a: Narrow) -> Narrow:
        """Each head's scales are where the head is."""
        return replace(a, bits=spec, scale=PartitionSpec(*spec[:-1], None))

    def layout(key: str, shape: tuple[int, ...], letters: Mapping[str, str], heads: int) -> PartitionSpec:
        name = key.split(".")[-1]
        axis_letters = letters.get("k" if name == JOINED else name, "").split()
        whole = (None,) * (len(shape) - len(axis_letters))
        # A joined pool is split between heads, never between keys and values of one.
        sizes = shape[len(whole) :] if name != JOINED else (heads, *shape[len(whole) + 1 :])
        return PartitionSpec(*whole, *activation_spec(" ".join(axis_letters), sizes))

    def of(spec: Spec, cache: Mapping[str, Any]) -> dict[str, Any]:
        letters, shapes = dict(spec.letters), dict(spec.token)
        heads = shapes["k"][0] if "k" in shapes else 0
        places = {key: layout(key, a.shape, letters, heads) for key, a in cache.items()}
        return {key: narrow(places[key], a) if isinstance(a, Narrow) else places[key] for key, a in cache.items()}

    return {name: of(specs[name][0], cache) for name, cache in caches.items()}


def constrain_caches(specs: Specs, caches: Caches) -> Caches:
    """These caches, split as `layouts` says."""
    return jax.tree.map(jax.lax.with_sharding_constraint, caches, layouts(specs, caches))


def is_ring(cache: Cache, entries: Cache) -> bool:
    """Whether the arrays per token are kept in rings."""
    return all(RING + name in cache for name in entries)


def is_windowed(cache: Cache, entries: Cache) -> bool:
    """Whether the arrays per token are kept in pages of a window."""
    return any(WINDOW + name in cache for name in (*entries, JOINED))


def row_states(cache: Cache) -> Cache:
    """The entries per sequence, by plain name."""
    return {key.removeprefix(ROW): a for key, a in cache.items() if key.startswith(ROW)}


# ---------------------------------------------------------------- stacked layers


def joined_layers(cache: Cache) -> Cache:
    """A stacked cache [layers pages ...] as one of all layers [layers * pages ...]. A kernel reads one layer's pages there in place;
    taken out of the stack, they would be copied for it, and copied back."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), cache)


def parted_layers(cache: Cache, layers: int) -> Cache:
    """The inverse of `joined_layers`."""
    return jax.tree.map(lambda a: a.reshape(layers, -1, *a.shape[1:]), cache)


def entry_counts(cache: Cache) -> dict[str, int]:
    """How many pages, pages of a window, and rows a layer of a stacked cache has, by `""`, `WINDOW` and `ROW`."""
    counts: dict[str, int] = {}
    for key, entry in cache.items():
        kind = key.partition(".")[0] + "." if "." in key else ""
        counts[ROW if kind == RING else kind] = jax.tree.leaves(entry)[0].shape[1]
    return counts


# ---------------------------------------------------------------- copying and rolling back sequences


def snapshot(specs: Specs, caches: Caches, rows: Int[Array, "B"]) -> Caches:
    """Copies what cannot be rolled back by changing a length, for these sequences: rings and states.

    Args:
        rows: rows of a buffer or slots of a pool; for values out of range, including -1, the copies have no meaning.
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
    """The caches with these copies put back: rolled back, or resumed in other rows.

    Args:
        copies: from `snapshot`, for as many sequences.
        rows: where they go; a copy for a row out of range, including -1, is dropped.
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
    """The pools with these pages copied, all at once: a page that is both copied and copied to is read before it is written.

    Args:
        to: the page that each is copied to; one that is out of range, including -1, is dropped.
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
    """Indexes, with `size` in place of those that are out of range: `mode="drop"` drops these; negative ones would wrap around."""
    return jnp.where((index >= 0) & (index < size), index, size)


# ---------------------------------------------------------------- rings


def with_tokens(
    cache: Cache, rows: Int[Array, "B"], entries: Cache, at: Int[Array, "B T"], live: Bool[Array, "B T"]
) -> Cache:
    """The rings after these tokens are written. A chunk that is longer than the ring leaves only its end there."""
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
    """The rings after `before` tokens concatenated with the new tokens, and the position of each entry: so a chunk may have any
    length, and the ring need not be larger than the window. Entries of no token are zero, whatever they contained.

    Args:
        past: by plain name.
    """
    size = next(iter(past.values())).shape[1]
    newest = before[:, None] - 1
    # The position in each entry.
    old = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size
    k_at = jnp.concatenate([jnp.where(old >= 0, old, NOWHERE), jnp.where(live, at, NOWHERE)], 1)

    def joined(name: str) -> Array:
        valid = (old >= 0).reshape(*old.shape, *(1,) * (past[name].ndim - 2))
        ring = jnp.where(valid, past[name], jnp.zeros((), past[name].dtype))
        return jnp.concatenate([ring.astype(dtype), entries[name].astype(dtype)], 1)

    return {name: joined(name) for name in entries}, k_at


def bytes_of_caches(caches: Any) -> int:
    """Bytes of all arrays of some caches, or of their shapes."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches))
