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
from argosy.models.parts.attend import Contiguous, contiguous
from argosy.models.parts.weight import Leaves, merge, split

SMALLEST = 32  # of the buckets, in tokens


def bucket(length: int) -> int:
    """The next size that programs are compiled for: powers of two and the halves between them."""
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


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
    """Generates from one model. `weights` may be exchanged between calls for others of the same shapes."""

    def __init__(self, model: Any):
        self.graph, self.weights = split(model)
        self.context, self.vocab, self.dtype = model.config.context, model.config.vocab, model.dtype
        self.specs = model.layers.holds()

    def generate(self, prompts: list[list[int]], rows: list[Sampling], seeds: list[int], most: int) -> Iterator[Step]:
        """Tokens of all rows, step by step, at most `most` of them. The caller stops a row by no longer reading it.

        A row's tokens depend on its own prompt, settings and seed alone, not on the rows beside it (to rounding).
        """
        lengths = np.asarray([len(p) for p in prompts], np.int32)
        width = min(bucket(int(lengths.max())), max(self.context, int(lengths.max())))
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = prompt
        room = bucket(int(lengths.max()) + most)
        need = Need.of(rows)
        settings = {name: jnp.asarray(values) for name, values in table(rows).items()}
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
        cache = contiguous(self.specs, len(prompts), room, self.dtype)
        live, step = _prefill(self.graph, need, self.dtype, self.vocab)(
            self.weights, tokens, lengths, cache, settings, keys
        )
        following = _decode(self.graph, need, self.dtype)
        for i in range(most):
            ahead = following(self.weights, live, settings, keys) if i + 1 < most else None
            yield step
            if ahead is not None:
                live, step = ahead


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
        x, cache, _ = model.hidden(tokens, Contiguous(at, here), cache)
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
        x, cache, _ = model.hidden(live.tokens[:, None], Contiguous(at, jnp.ones_like(at, bool)), live.cache)
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
