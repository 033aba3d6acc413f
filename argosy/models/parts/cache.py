"""What layers keep of the past, and where: buffers, pools, rings, states.

A layer declares it (`Spec`), the caller allocates it (`contiguous`, `paged`), strategies of `parts.attend` read and write it.

A layer that reads no further back than `span` tokens keeps a ring of that many and not everything: one for each row of a buffer,
one for each slot of a pool. Token p lies at p modulo its size, so what an entry holds follows from the length of its sequence
alone, and a slot's former owner needs no clearing. The names of such arrays begin with `RECENT`.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Cache = dict[str, Array]  # of one layer; names as in its Spec, `RECENT` before those that are rings
RECENT = "recent."
NOWHERE = np.int32(2**30)  # the position of an entry that holds nothing: after every query


@dataclass(frozen=True)
class Spec:
    """What one layer keeps: arrays for each token, arrays for each sequence, and how many tokens back it ever reads."""

    token: tuple[tuple[str, tuple[int, ...]], ...] = ()
    row: tuple[tuple[str, tuple[int, ...]], ...] = ()
    span: int | None = None


Specs = dict[str, tuple[Spec, int | None]]  # {cache name: what one layer holds, and how many share the array}


def contiguous(specs: Specs, rows: int, length: int, dtype: Any = jnp.float32) -> dict[str, Cache]:
    """Empty buffers for `Contiguous`: [rows length ...] for each token, [rows ...] for each sequence; of layers that reach
    less far back than `length`, [rows span ...]."""
    return _allocate(specs, (rows, length), rows, dtype, length)


def paged(specs: Specs, slots: int, pages: int, page: int, dtype: Any = jnp.float32) -> dict[str, Cache]:
    """Empty pools for `Paged`: [pages page ...] for each token, [slots ...] for each sequence; of layers that reach back
    `span` tokens, [slots span ...] where that is less."""
    return _allocate(specs, (pages, page), slots, dtype, pages * page // slots)


def _allocate(specs: Specs, token: tuple[int, int], rows: int, dtype: Any, roomy: int) -> dict[str, Cache]:
    def one(spec: Spec, layers: int | None) -> Cache:
        lead = () if layers is None else (layers,)
        ring = spec.span is not None and spec.span < roomy
        place = (rows, spec.span) if ring else token
        tokens = {RECENT * ring + n: jnp.zeros((*lead, *place, *shape), dtype) for n, shape in spec.token}
        return tokens | {n: jnp.zeros((*lead, rows, *shape), jnp.float32) for n, shape in spec.row}

    return {name: one(*spec) for name, spec in specs.items()}


# ---------------------------------------------------------------- rings


def is_ring(cache: Cache) -> bool:
    return next(iter(cache)).startswith(RECENT)


def whole(cache: Cache | None) -> Array:
    """An array that holds everything.

    Raises:
        ValueError: there is none: a ring does not tell how long its sequence can become.
    """
    if cache is None or is_ring(cache):
        raise ValueError("no cache, or a ring: it does not tell how long a sequence can become")
    return next(iter(cache.values()))


def with_tokens(
    cache: Cache, rows: Int[Array, "B"], held: Cache, at: Int[Array, "B T"], live: Bool[Array, "B T"]
) -> Cache:
    """The rings with the last of these tokens in them. Of a chunk longer than the ring, only its end is written."""
    size = next(iter(cache.values())).shape[1]
    last = jnp.max(jnp.where(live, at, -1), 1, keepdims=True)
    where = jnp.where(live & (at > last - size), at % size, size)  # past the end: dropped
    return {
        name: ring.at[rows[:, None], where].set(held[name.removeprefix(RECENT)].astype(ring.dtype), mode="drop")
        for name, ring in cache.items()
    }


def beside(
    past: Cache, held: Cache, before: Int[Array, "B"], at: Int[Array, "B T"], live: Bool[Array, "B T"], dtype: Any
) -> tuple[Cache, Int[Array, "B S"]]:
    """The rings as they were after `before` tokens with the new tokens beside them, and the position of each entry: so a chunk
    may be of any length, and the ring no larger than the window."""
    size = next(iter(past.values())).shape[1]
    newest = before[:, None] - 1
    old = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size  # what each entry holds
    k_at = jnp.concatenate([jnp.where(old >= 0, old, NOWHERE), jnp.where(live, at, NOWHERE)], 1)
    names = {name: name.removeprefix(RECENT) for name in past}
    return {n: jnp.concatenate([past[r].astype(dtype), held[n].astype(dtype)], 1) for r, n in names.items()}, k_at
