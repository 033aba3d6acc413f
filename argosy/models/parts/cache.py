"""What layers keep of the past, and where: buffers, pools, rings, states.

A layer declares it (`Spec`), the caller allocates it (`contiguous`, `paged`), strategies of `parts.attend` read and write it.
An entry has one of three kinds, and the cache of a layer names its arrays by them:

    "k"          token   one for each token: a buffer for each row, or pages of a pool
    "ring.k"     ring    one for each of the last `span` tokens, for layers that read no further back (a window)
    "row.state"  row     one for each sequence: a state that a recurrent layer carries along

In a ring token p lies at p modulo its size, so what an entry holds follows from the length of its sequence alone, and a slot's
former owner needs no clearing. With `slack`, a ring keeps that many tokens more than its layer reads: a sequence can then be
rolled back by as many (a rejected draft) and resumed. Pages and buffers need nothing for that, states need a `snapshot`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from argosy.ops.attention import NOWHERE
from argosy.ops.precision import sums_in

Cache = dict[str, Array]  # of one layer
Kind = Literal["token", "ring", "row"]
RING, ROW = "ring.", "row."


class Entry(NamedTuple):
    """One array that a layer keeps: its name, the shape for one token or one sequence, and how it is kept.

    dtype: None: that of the whole cache. size: of a ring, in tokens.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    dtype: Any = None
    size: int | None = None

    @property
    def key(self) -> str:
        """Its name in the cache of a layer."""
        return {"token": "", "ring": RING, "row": ROW}[self.kind] + self.name


@dataclass(frozen=True)
class Spec:
    """What one layer keeps: (name, shape) of arrays for each token and for each sequence, and how many tokens back it ever
    reads, itself included (None: all of them). States are float32 at least: they sum over thousands of tokens."""

    token: tuple[tuple[str, tuple[int, ...]], ...] = ()
    row: tuple[tuple[str, tuple[int, ...]], ...] = ()
    span: int | None = None

    def entries(self, longest: int, slack: int = 0) -> Iterator[Entry]:
        """Its arrays, for sequences of at most `longest` tokens: rings where they are shorter than that."""
        size = None if self.span is None or self.span + slack >= longest else self.span + slack
        for name, shape in self.token:
            yield Entry(name, shape, "token" if size is None else "ring", None, size)
        for name, shape in self.row:
            yield Entry(name, shape, "row", jnp.float32)


Specs = dict[str, tuple[Spec, int | None]]  # {cache name: what one layer keeps, and how many layers share the arrays}
Caches = dict[str, Cache]


def contiguous(specs: Specs, rows: int, length: int, dtype: Any = jnp.float32, *, slack: int = 0) -> Caches:
    """Empty buffers for `Contiguous`: [rows length ...] for each token, [rows span ...] for rings, [rows ...] for states.

    Args:
        slack: tokens that a sequence may be rolled back by.
    """
    return _allocate(specs, (rows, length), rows, dtype, length, slack)


def paged(
    specs: Specs, slots: int, pages: int, page: int, dtype: Any = jnp.float32, *, longest: int | None = None, slack: int = 0
) -> Caches:
    """Empty pools for `Paged`: [pages page ...] for each token, [slots span ...] for rings, [slots ...] for states.

    Args:
        longest: tokens that one sequence can have; layers that read no further back than that keep rings. The whole pool unless
            given.
        slack: tokens that a sequence may be rolled back by.
    """
    return _allocate(specs, (pages, page), slots, dtype, pages * page if longest is None else longest, slack)


def _allocate(specs: Specs, token: tuple[int, int], rows: int, dtype: Any, longest: int, slack: int) -> Caches:
    def one(spec: Spec, layers: int | None) -> Cache:
        lead = () if layers is None else (layers,)
        place = {"token": token, "row": (rows,)}
        return {
            e.key: jnp.zeros((*lead, *place.get(e.kind, (rows, e.size)), *e.shape), dtype if e.dtype is None else sums_in(dtype))
            for e in spec.entries(longest, slack)
        }

    return {name: one(*spec) for name, spec in specs.items()}


def is_ring(cache: Cache, held: Cache) -> bool:
    """Whether what is held for each token goes to rings."""
    return all(RING + name in cache for name in held)


def states(cache: Cache) -> Cache:
    """The entries for each sequence, by plain name."""
    return {key.removeprefix(ROW): a for key, a in cache.items() if key.startswith(ROW)}


# ---------------------------------------------------------------- copying and rolling back sequences


def snapshot(specs: Specs, caches: Caches, rows: Int[Array, "B"]) -> Caches:
    """A copy of what cannot be rolled back by its length alone, of these sequences: rings and states.

    Args:
        rows: the rows of a buffer or the slots of a pool; out of range, -1 included, they give copies of no meaning.
    """

    def one(name: str, cache: Cache) -> Cache:
        axis = int(specs[name][1] is not None)
        return {
            key: jnp.take(a, jnp.clip(rows, 0, a.shape[axis] - 1), axis)
            for key, a in cache.items()
            if key.startswith((RING, ROW))
        }

    return {name: one(name, cache) for name, cache in caches.items()}


def restore(specs: Specs, caches: Caches, copies: Caches, rows: Int[Array, "B"]) -> Caches:
    """The caches with these copies in place of what the sequences have: rolled back, or resumed in other rows.

    Args:
        copies: from `snapshot`, of as many sequences.
        rows: where they go; out of range, -1 included, a copy goes nowhere.
    """

    def one(name: str, cache: Cache) -> Cache:
        stacked = specs[name][1] is not None
        out = dict(cache)
        for key, copy in copies[name].items():
            a = out[key]
            where = nobodys(rows, a.shape[int(stacked)])
            out[key] = (a.at[:, where] if stacked else a.at[where]).set(copy.astype(a.dtype), mode="drop")
        return out

    return {name: one(name, cache) for name, cache in caches.items()}


def nobodys(index: Int[Array, "*B"], size: int) -> Int[Array, "*B"]:
    """Indexes with those out of range moved past the end, where `mode="drop"` drops them: a negative one would wrap round."""
    return jnp.where((index >= 0) & (index < size), index, size)


# ---------------------------------------------------------------- rings


def with_tokens(
    cache: Cache, rows: Int[Array, "B"], held: Cache, at: Int[Array, "B T"], live: Bool[Array, "B T"]
) -> Cache:
    """The rings with the last of these tokens in them. Of a chunk longer than the ring, only its end is written."""
    out = dict(cache)
    for name, new in held.items():
        ring = cache[RING + name]
        size = ring.shape[1]
        last = jnp.max(jnp.where(live, at, -1), 1, keepdims=True)
        where = jnp.where(live & (at > last - size), at % size, size)
        out[RING + name] = ring.at[nobodys(rows, len(ring))[:, None], where].set(new.astype(ring.dtype), mode="drop")
    return out


def beside(
    past: Cache, held: Cache, before: Int[Array, "B"], at: Int[Array, "B T"], live: Bool[Array, "B T"], dtype: Any
) -> tuple[Cache, Int[Array, "B S"]]:
    """The rings as they were after `before` tokens with the new tokens beside them, and the position of each entry: so a chunk
    may be of any length, and the ring no larger than the window. Entries of nobody are zero, whatever was left in them.

    Args:
        past: by plain name.
    """
    size = next(iter(past.values())).shape[1]
    newest = before[:, None] - 1
    old = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size  # the position that each entry holds
    k_at = jnp.concatenate([jnp.where(old >= 0, old, NOWHERE), jnp.where(live, at, NOWHERE)], 1)

    def joined(name: str) -> Array:
        own = (old >= 0).reshape(*old.shape, *(1,) * (past[name].ndim - 2))
        kept = jnp.where(own, past[name], jnp.zeros((), past[name].dtype))
        return jnp.concatenate([kept.astype(dtype), held[name].astype(dtype)], 1)

    return {name: joined(name) for name in held}, k_at


def bytes_of(caches: Any) -> int:
    """Bytes of all arrays of some caches, or of their shapes."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches))
