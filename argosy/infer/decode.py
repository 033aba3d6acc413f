"""Prefill and decode over contiguous buffers. Works on token ids only, and knows nothing of text.

The programs, and what makes each compile again:

    prefill    one prompt to its last logits and its cache     a new bucket of prompt lengths
    decode     one token of each row to logits                 a new bucket of rows or room
    sample     logits to tokens                                a new bucket of rows, a first draw, a first penalty

Only the first two contain the model, so only they take seconds to compile. A decode step is two dispatches, decode and sample;
the next step is dispatched before the tokens of the previous one are read, so the host's work (stopping, streaming) overlaps
with the device's.

On CPUs, scanned layers decode unrolled: XLA:CPU copies each layer's slice of the stacked weights before it multiplies by it, which
makes a step of SmolLM2 135M take twice as long. Each layer's weights are a view of the stacked array (`infer.views`), so this
needs no memory. Prefill, which reads the weights once for many tokens, stays a scan, which compiles in a third of the time.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.progress import Say, telling
from argosy.infer.sample import Need, Sampling, choose, table
from argosy.infer.views import Views, viewable
from argosy.models.parts.attend import Contiguous, Packed
from argosy.models.parts.cache import Caches, Specs, contiguous, paged
from argosy.models.parts.weight import Leaves, merge, split, variable

# Smallest bucket of whole sequences, in tokens.
SMALLEST = 32
PROMPT = 64  # smallest bucket of prompts, in tokens
# The smallest room of buffers, in tokens. On a CPU, SmolLM2 135M decodes as fast with 256 as with 96; a 1M model loses a sixth.
ROOM = 256
# Tokens of an answer for which buffers have room from the start. A step reads the whole room (on a CPU, SmolLM2 135M takes 20 %
# longer with 512 than with 256), and a larger room must be compiled in the middle of an answer.
AHEAD = 512


def bucket(length: int) -> int:
    """The next length that programs are compiled for: powers of two and the midpoints between them."""
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def prompt_bucket(length: int) -> int:
    """The next length that prefill is compiled for: powers of two, above 256 also the midpoints between them."""
    return bucket(length) if length > 256 else max(PROMPT, 1 << (length - 1).bit_length())


def row_bucket(rows: int) -> int:
    """The next number of rows that programs are compiled for: a power of two."""
    return 1 << (rows - 1).bit_length()


def decode_rows(rows: int) -> int:
    """The next number of rows that decode is compiled for: a power of four. One row alone is a matrix-vector product, at half the
    time of two; from two to eight rows, a step of a CPU takes the same time."""
    size = 1
    while size < rows:
        size *= 4
    return size


def room_for(tokens: int, context: int) -> int:
    """The room of buffers for `tokens` tokens: a power of two, at most the context."""
    return min(max(ROOM, 1 << (tokens - 1).bit_length()), context)


class Draws(NamedTuple):
    """The sampler's state between steps, on the device."""

    made: Int[Array, ""]  # tokens chosen so far
    seen: Any = None  # [B V] of prompt and answer, where penalties need it
    counts: Any = None  # [B V] in the answer


class NextTokens(NamedTuple):
    """One token for each row, and its log-probability; arrays still being copied to the host."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]


class Program:
    """A jitted function that remembers the sizes it was compiled for."""

    def __init__(self, function: Any):
        self.function, self.sizes = function, set()

    def __call__(self, say: Say | None, what: str, sizes: tuple[int, ...], *arguments: Any) -> Any:
        """Calls the function; says `compiling for {what}` if these sizes are new and compiling takes long."""
        if sizes in self.sizes:
            return self.function(*arguments)
        with telling(say, f"compiling for {what}"):
            out = self.function(*arguments)
        self.sizes.add(sizes)
        return out


class Generator:
    """Generates tokens from one model. Its graph is fixed, its weights are read at each call.

    Args:
        model: a module, which is split here: 15 ms for 270 weights. `infer.held.Held` reuses a generator while nothing changes.
        say: called with what is being compiled, if that takes longer than a second.
    """

    def __init__(self, model: Any, say: Say | None = None):
        self.model, self.say = model, say
        self.graph, weights = split(model)
        self.variables = {address: variable(model, address) for address in weights}
        self.context, self.dtype = model.config.context, model.dtype

    def weights(self) -> Leaves:
        """The current weights."""
        return {address: v.get_value() for address, v in self.variables.items()}

    @cached_property
    def views(self) -> Views | None:
        """The model that decodes, where it is not the model itself."""
        return Views(self.model) if self.model.layers.run.stacked and viewable(self.weights()) else None

    @cached_property
    def specs(self) -> Specs:
        """Of the buffers of decode."""
        return (self.model if self.views is None else self.views.model).layers.holds()

    @cached_property
    def forward(self) -> Program:
        return _forward(self.graph, self.dtype)

    @cached_property
    def _prefill(self) -> Program:
        return _prefill(self.graph, self.dtype)

    @cached_property
    def _decode(self) -> Program:
        return _decode(self.graph if self.views is None else self.views.graph, self.dtype)

    # ---------------------------------------------------------------- whole sequences

    def logits(self, tokens: Int[np.ndarray, "B T"], segments: Int[np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole sequences, causal within each segment."""
        return self.forward(
            self.say, f"{tokens.shape[1]} tokens", tokens.shape, self.weights(), tokens, segments
        )

    # ---------------------------------------------------------------- token by token

    def generate(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Sampling], keys: Any, most: int
    ) -> Iterator[NextTokens]:
        """Generates tokens of all rows, step by step, at most `most` of them. The caller stops a row by no longer reading it.

        A row's tokens depend on its own prompt, settings and key alone, not on the rows beside it (to rounding). There may be
        more rows in a step than prompts: they are padded to a number for which a program exists.

        Args:
            keys: from `sample.streams`, one for each row.
        """
        B = decode_rows(len(prompts))
        filler = B - len(prompts)
        rows = [*rows, *[Sampling()] * filler]
        keys = keys[np.minimum(np.arange(B), len(prompts) - 1)]
        longest = max(map(len, prompts))
        room = room_for(longest + min(most, AHEAD), self.context)
        need, settings = Need.of(rows), {name: jnp.asarray(values) for name, values in table(rows).items()}
        weights = self.weights()
        logits, cache = self.prefilled(weights, prompts, B, room)
        weights = weights if self.views is None else self.views.of(weights)
        lengths = jnp.asarray([*map(len, prompts), *[0] * filler], jnp.int32)
        draws = self.draws(prompts, B, need)
        draws, step = self._sample(need, logits, draws, settings, keys)
        for i in range(most):
            ahead = None
            if i + 1 < most:
                if longest + i + 1 > room:
                    room = room_for(room + 1, self.context)
                    cache = self.grown(cache, room)
                logits, lengths, cache = self._decode(
                    self.say, f"{room} tokens", (B, room), weights, step.tokens, lengths, cache
                )
                ahead = self._sample(need, logits, draws, settings, keys)
            yield step
            if ahead is not None:
                draws, step = ahead

    def prefilled(
        self, weights: Leaves, prompts: Sequence[Sequence[int]], B: int, room: int
    ) -> tuple[Float[Array, "B V"], Caches]:
        """The logits after each prompt, and buffers with their caches. Rows beyond the prompts are empty.

        Prompts are processed one by one: rows of unequal length need no padding, and one program serves any number of rows.
        """
        cache = contiguous(self.specs, B, room, self.dtype)
        logits = jnp.zeros((B, self.model.config.vocab), jnp.float32)
        spans = [spec.span for spec, _ in self.specs.values() if spec.span is not None and spec.span < room]
        # Gives the same layers rings as in the buffers.
        longest = 1 + max(spans, default=0)
        for row, prompt in enumerate(prompts):
            T = min(prompt_bucket(len(prompt)), self.context)
            tokens = np.zeros((1, T), np.int32)
            tokens[0, : len(prompt)] = prompt
            length = np.asarray([len(prompt)], np.int32)
            last, own = self._prefill(
                self.say, f"prompts of {T} tokens", (T, longest), weights, tokens, length, longest
            )
            logits, cache = _put(logits, last, (row, 0)), self.with_row(cache, own, row)
        return logits, cache

    def with_row(self, cache: Caches, own: Caches, row: int) -> Caches:
        """Writes the cache of one prompt into a row of the buffers, in place."""

        def put(name: str, n: str, a: Array) -> Array:
            if self.views is not None:
                whole, layer = self.views.cache_places[name]
                return _put_layer(a, own[whole][n], layer, (row, *(0,) * (a.ndim - 1)))
            lead = (row,) if self.specs[name][1] is None else (0, row)
            return _put(a, own[name][n], (*lead, *(0,) * (a.ndim - len(lead))))

        return {name: {n: put(name, n, a) for n, a in arrays.items()} for name, arrays in cache.items()}

    def grown(self, cache: Caches, room: int) -> Caches:
        """The buffers enlarged to `room` tokens. Rings and states keep their size."""

        def pad(name: str, n: str, a: Array) -> Array:
            spec, layers = self.specs[name]
            per_token = {entry for entry, _ in spec.token}  # a ring has another name
            return _pad(a, 1 if layers is None else 2, room) if n in per_token else a

        return {name: {n: pad(name, n, a) for n, a in arrays.items()} for name, arrays in cache.items()}

    def draws(self, prompts: Sequence[Sequence[int]], B: int, need: Need) -> Draws:
        """The sampler's state at the start."""
        made = jnp.zeros((), jnp.int32)
        if not need.penalties:
            return Draws(made)
        seen = np.zeros((B, self.model.config.vocab), bool)
        for row, prompt in zip(seen, prompts):
            row[np.asarray(prompt)] = True
        return Draws(made, jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32))

    def _sample(
        self, need: Need, logits: Array, draws: Draws, settings: dict[str, Array], keys: Any
    ) -> tuple[Draws, NextTokens]:
        return _sampler(need)(self.say, f"draws of {len(logits)} rows", logits.shape, logits, draws, settings, keys)


# ---------------------------------------------------------------- programs


def _model(graph: Any, weights: Leaves, dtype: Any) -> Any:
    model = merge(graph, weights)
    model.dtype = dtype
    return model


@lru_cache(maxsize=64)
def _forward(graph: Any, dtype: Any) -> Program:
    """(weights, tokens [B T], segments [B T]) -> logits [B T V]."""

    def forward(weights: Leaves, tokens: Array, segments: Array) -> Array:
        return _model(graph, weights, dtype)(tokens, Packed(segments))[0]

    return Program(jax.jit(forward))


@lru_cache(maxsize=64)
def _prefill(graph: Any, dtype: Any) -> Program:
    """(weights, tokens [1 T] padded right, length [1], longest) -> (the last logits [1 V], its cache of T tokens)."""

    def prefill(weights: Leaves, tokens: Array, length: Array, longest: int) -> tuple[Array, Caches]:
        T = tokens.shape[1]
        at = jnp.arange(T, dtype=jnp.int32)[None]
        model = _model(graph, weights, dtype)
        cache = paged(model.layers.holds(), 1, 1, T, dtype, longest=longest)
        x, cache, _ = model.hidden(tokens, Contiguous(at, at < length[:, None], fresh=True), cache)
        last = jnp.take_along_axis(x, (length - 1)[:, None, None], 1)
        return model.unembed(last)[:, 0], cache

    return Program(jax.jit(prefill, static_argnums=3))


@lru_cache(maxsize=64)
def _decode(graph: Any, dtype: Any) -> Program:
    """(weights, tokens [B], lengths [B], buffers) -> (logits [B V], lengths, buffers), the buffers in place."""

    def decode(weights: Leaves, tokens: Array, lengths: Array, cache: Caches) -> tuple[Array, Array, Caches]:
        at = lengths[:, None]
        model = _model(graph, weights, dtype)
        x, cache, _ = model.hidden(tokens[:, None], Contiguous(at, jnp.ones_like(at, bool)), cache)
        return model.unembed(x)[:, 0], lengths + 1, cache

    return Program(jax.jit(decode, donate_argnums=3))


@lru_cache(maxsize=64)
def _sampler(need: Need) -> Program:
    """(logits [B V], Draws, settings, keys) -> (Draws, NextTokens)."""

    def sample(logits: Array, draws: Draws, settings: dict[str, Array], keys: Any) -> tuple[Draws, NextTokens]:
        keys = jax.vmap(partial(jax.random.fold_in, data=draws.made))(keys) if need.draws else keys
        tokens, logprobs = choose(logits, settings, keys, need, draws.seen, draws.counts)
        seen, counts = draws.seen, draws.counts
        if need.penalties:
            rows = jnp.arange(len(tokens))
            seen, counts = seen.at[rows, tokens].set(True), counts.at[rows, tokens].add(1)
        return Draws(draws.made + 1, seen, counts), NextTokens(tokens, logprobs)

    return Program(jax.jit(sample, donate_argnums=1))


# One array at a time: all of a cache in one program takes 2.6 s to compile for SmolLM2 135M, these two 0.1 s for each shape.


@partial(jax.jit, donate_argnums=0)
def _put(a: Array, b: Array, start: tuple[Any, ...]) -> Array:
    """Writes an array into another, in place."""
    return jax.lax.dynamic_update_slice(a, b, start)


@partial(jax.jit, donate_argnums=0)
def _put_layer(a: Array, layers: Array, layer: Any, start: tuple[Any, ...]) -> Array:
    """The array with one layer of a stacked one inside it, in place."""
    return jax.lax.dynamic_update_slice(a, jax.lax.dynamic_index_in_dim(layers, layer, keepdims=False), start)


@partial(jax.jit, static_argnums=(1, 2))
def _pad(a: Array, axis: int, size: int) -> Array:
    """Adds zeros at the end of an axis."""
    return jnp.pad(a, [(0, size - a.shape[axis]) if i == axis else (0, 0) for i in range(a.ndim)])
