"""Prefill and decode over contiguous buffers: the smallest engine. Purely token ids; knows nothing of text.

Programs are compiled once for each bucket of lengths. The next step is dispatched before the tokens of the last one are read,
so the host's work (stopping, streaming) is hidden behind the device's.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.infer.sample import Need, Sampling, choose, table
from argosy.models.parts.attend import Contiguous
from argosy.models.parts.cache import contiguous
from argosy.models.parts.weight import Leaves, merge, split

SMALLEST = 32  # of the buckets, in tokens
AHEAD = 64  # tokens that the buffers have room for at first, beyond the prompt


def bucket(length: int) -> int:
    """The next size that programs are compiled for: powers of two and the halves between them."""
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def row_bucket(rows: int) -> int:
    """The next number of rows that programs are compiled for: a power of two."""
    return 1 << (rows - 1).bit_length()


class Live(NamedTuple):
    """What one step leaves for the next, all on the device."""

    cache: Any
    tokens: Int[Array, "B"]  # the newest of each row, not yet in the cache
    lengths: Int[Array, "B"]  # tokens in the cache
    made: Int[Array, ""]  # tokens chosen so far
    seen: Any  # [B V] of prompt and answer, where penalties need it
    counts: Any  # [B V] in the answer


class Step(NamedTuple):
    """One token for each row, and its log-probability; arrays on their way to the host."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]


class Decoder:
    """Generates from one model, as its weights are now."""

    def __init__(self, model: Any):
        self.graph, self.weights = split(model)
        self.context, self.vocab, self.dtype = model.config.context, model.config.vocab, model.dtype
        self.specs, self.stacked = model.layers.holds(), model.layers.run.stacked

    def generate(self, prompts: list[list[int]], rows: list[Sampling], seeds: list[int], most: int) -> Iterator[Step]:
        """Tokens of all rows, step by step, at most `most` of them. The caller stops a row by no longer reading it.

        A row's tokens depend on its own prompt, settings and seed alone, not on the rows beside it (to rounding). There may
        be more rows in a step than prompts: they are filled up to a number that a program exists for.
        """
        filler = row_bucket(len(prompts)) - len(prompts)
        prompts, rows, seeds = [*prompts, *[[0]] * filler], [*rows, *[Sampling()] * filler], [*seeds, *[0] * filler]
        lengths = np.asarray([len(p) for p in prompts], np.int32)
        longest = int(lengths.max())
        tokens = np.zeros((len(prompts), min(bucket(longest), max(self.context, longest))), np.int32)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = prompt
        room = bucket(longest + min(most, AHEAD))
        need = Need.of(rows)
        settings = {name: jnp.asarray(values) for name, values in table(rows).items()}
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
        cache = contiguous(self.specs, len(prompts), room, self.dtype)
        live, step = _prefill(self.graph, need, self.dtype, self.vocab)(
            self.weights, tokens, lengths, cache, settings, keys
        )
        following = _decode(self.graph, need, self.dtype)
        for i in range(most):
            ahead = None
            if i + 1 < most:
                if longest + i + 1 > room:
                    room = bucket(room + 1)
                    live = live._replace(cache=self.longer(live.cache, room))
                ahead = following(self.weights, live, settings, keys)
            yield step
            if ahead is not None:
                live, step = ahead

    def longer(self, cache: Any, room: int) -> Any:
        """The buffers with room for so many tokens. Every step reads all of a buffer, so it starts small and grows."""

        def one(name: str, arrays: Any) -> Any:
            axis = 2 if self.stacked else 1
            per_token = {n for n, _ in self.specs[name][0].token}  # a ring keeps its size
            pad = {
                n: [(0, room - a.shape[axis]) if i == axis else (0, 0) for i in range(a.ndim)]
                for n, a in arrays.items()
            }
            return {n: jnp.pad(a, pad[n]) if n in per_token else a for n, a in arrays.items()}

        return {name: one(name, arrays) for name, arrays in cache.items()}


def _with(graph: Any, weights: Leaves, dtype: Any) -> Any:
    model = merge(graph, weights)
    model.dtype = dtype
    return model


@lru_cache(maxsize=64)
def _prefill(graph: Any, need: Need, dtype: Any, vocab: int) -> Any:
    """(weights, tokens [B T] padded right, lengths, empty cache, settings, keys) -> (Live, the first Step)."""

    def prefill(
        weights: Leaves, tokens: Array, lengths: Array, cache: Any, settings: Any, keys: Any
    ) -> tuple[Live, Step]:
        B, T = tokens.shape
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        here = at < lengths[:, None]
        model = _with(graph, weights, dtype)
        x, cache, _ = model.hidden(tokens, Contiguous(at, here, fresh=True), cache)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], 1)
        seen = counts = None
        if need.penalties:
            rows = jnp.arange(B)[:, None]
            seen = jnp.zeros((B, vocab), bool).at[rows, jnp.where(here, tokens, vocab)].set(True, mode="drop")
            counts = jnp.zeros((B, vocab), jnp.int32)
        live = Live(cache, jnp.zeros(B, jnp.int32), lengths, jnp.zeros((), jnp.int32), seen, counts)
        return _chosen(model.unembed(last)[:, 0], live, settings, keys, need)

    return jax.jit(prefill, donate_argnums=3)


@lru_cache(maxsize=64)
def _decode(graph: Any, need: Need, dtype: Any) -> Any:
    """(weights, Live, settings, keys) -> (Live, Step)."""

    def decode(weights: Leaves, live: Live, settings: Any, keys: Any) -> tuple[Live, Step]:
        at = live.lengths[:, None]
        model = _with(graph, weights, dtype)
        attend = Contiguous(at, jnp.ones_like(at, bool))
        x, cache, _ = model.hidden(live.tokens[:, None], attend, live.cache)
        live = live._replace(cache=cache, lengths=live.lengths + 1)
        return _chosen(model.unembed(x)[:, 0], live, settings, keys, need)

    return jax.jit(decode, donate_argnums=1)


def _chosen(logits: Array, live: Live, settings: Any, keys: Any, need: Need) -> tuple[Live, Step]:
    keys = jax.vmap(partial(jax.random.fold_in, data=live.made))(keys) if need.draws else keys
    tokens, logprobs = choose(logits, settings, keys, need, live.seen, live.counts)
    if need.penalties:
        rows = jnp.arange(len(tokens))
        live = live._replace(seen=live.seen.at[rows, tokens].set(True), counts=live.counts.at[rows, tokens].add(1))
    return live._replace(tokens=tokens, made=live.made + 1), Step(tokens, logprobs)
