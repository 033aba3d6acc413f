"""The forward pass over whole sequences: logits, and the log-probability of each token; alone, or under one of the adapters of an
engine (`infer.engine.adapters`), which is data: no adapter compiles a program of its own.

Sequences of similar length share a forward pass (`length_batches`). Lengths and numbers of sequences are padded to a few sizes, because
each pair of them is a program that takes seconds to compile.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from argosy.core.progress import Say, telling
from argosy.infer.cpu.prepare import WeightPreparation
from argosy.infer.cpu.views import is_on_one_cpu
from argosy.infer.forward.passes import ByLayer, Forward, OneProgram, PassKind, Tail, whole_sequences
from argosy.infer.placement import home_mesh, weights_home
from argosy.infer.sampling.sample import token_logprobs
from argosy.models.parts.attention.attend import Attend, Packed
from argosy.models.parts.attention.cache import Caches, Specs
from argosy.models.parts.weight import Leaves, split, variable
from argosy.parallel.scope import scope

if TYPE_CHECKING:
    from argosy.infer.engine.adapters import Adapters, LoadedAdapter

# The shortest length that programs are compiled for, in tokens.
SHORTEST = 32
# Tokens whose logits are in memory at a time while sequences are scored: 128 MB for a vocabulary of 128k.
CHUNK = 256
# Tokens of one forward pass over several sequences, padding included. On two CPU cores, sequences of 24 to 120 tokens: 42 to 47
# thousand tokens/s from 1024 to 8192 with a model of 260k parameters, and 232, 220, 167 at 1024, 2048, 4096 with 135M, since larger
# batches hold more padding. One at a time: 10 to 14 thousand, and 135.
BATCH = 2048


class TokenScores(NamedTuple):
    """Scores of the tokens of one sequence, from the second on.

    logprobs: log-probability of each token, given those before it.
    greedy: whether it is the most likely token.
    """

    logprobs: Float[np.ndarray, " S"]
    greedy: Bool[np.ndarray, " S"]


def length_bucket(length: int, shortest: int = SHORTEST) -> int:
    """The next length that programs are compiled for: powers of two and the midpoints between them."""
    size = shortest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def length_batches(lengths: Sequence[int], tokens: int, context: int) -> Iterator[list[int]]:
    """Divides sequences of these lengths into batches of at most so many tokens, padding included; the longest come first. A sequence
    longer than that is a batch of its own. Yields the places of each batch.

    All batches but the last have the power of two that fits their longest sequence, so each length costs one program, or two.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    at = 0
    while at < len(order):
        longest = min(length_bucket(lengths[order[at]]), context)
        count = 1 << max(tokens // longest, 1).bit_length() - 1
        yield order[at : at + count]
        at += count


class SequenceScorer:
    """One model over whole sequences. Its graph is fixed, its weights are read at each call.

    Args:
        model: a module, which is split here: 15 ms for 270 weights. `infer.engine.cached_engine` reuses this object while nothing
            changes.
        say: called with what is being compiled, if that takes longer than a second.
        adapters: the adapters that `run` and `advance` may name.
        whole: whether the engine of these adapters, if it is built later, runs the model as one program, on CPUs too.

    specs: of the caches that `advance` takes.
    """

    def __init__(self, model: Any, say: Say | None = None, adapters: "Adapters | None" = None, *, whole: bool = False):
        self.say, self.dtype, self.context, self.adapters = say, model.dtype, model.config.context, adapters
        self.graph, weights = split(model)
        self.variables = {address: variable(model, address) for address in weights}
        self.home, stacked, local = weights_home(weights), model.layers.run.stacked, is_on_one_cpu(weights)
        if adapters is None:
            views = False
        elif adapters.base:
            # In the layout of the engine's forward pass, whose factors these are.
            views = set(adapters.base.values()) != set(weights)
        else:
            views = local and stacked and not whole
        preparation = WeightPreparation(model, views=views)
        # Scanned layers are one program anyway.
        if local and (views or not stacked):
            self.forward: Forward = ByLayer(model, adapters, together=1, preparation=preparation)
        else:
            self.forward = OneProgram(model, adapters, preparation=preparation)
        self.specs: Specs = self.forward.specs
        self._sizes: set[tuple[Any, ...]] = set()

    def weights(self) -> Leaves:
        """The current weights."""
        return {address: v.get_value() for address, v in self.variables.items()}

    def on_mesh(self) -> Any:
        """The scope of programs over several devices."""
        mesh = home_mesh(self.home)
        return nullcontext() if mesh is None else scope(mesh)

    def padded(self, ids: Int[np.ndarray, "B T"]) -> tuple[np.ndarray, np.ndarray]:
        """The sequences at a length that a program is compiled for, and their segments."""
        T = ids.shape[1]
        width = ((0, 0), (0, max(T, min(length_bucket(T), self.context)) - T))
        return np.pad(ids.astype(np.int32), width), np.pad(np.ones_like(ids, np.int32), width)

    def logits(self, ids: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
        """Logits at every token, causal."""
        return np.asarray(self.run("logits", _logits, *self.padded(ids)))[:, : ids.shape[1]]

    def scores(self, rows: Sequence[Sequence[int] | np.ndarray], adapter: "LoadedAdapter | None" = None) -> list[TokenScores]:
        """The log-probability of each token of these sequences given those before it, in one forward pass. A sequence may have one
        token more than the context, because nothing follows the last."""
        tokens, segments = self.padded_rows([row[:-1] for row in rows])
        following = np.zeros_like(tokens)
        for i, row in enumerate(rows):
            following[i, : len(row) - 1] = row[1:]
        outputs = self.run("scores", _scores, tokens, segments, following, adapter=adapter)
        logprobs, greedy = map(np.asarray, outputs)
        return [TokenScores(logprobs[i, : len(row) - 1], greedy[i, : len(row) - 1]) for i, row in enumerate(rows)]

    def followers(
        self, rows: Sequence[Sequence[int] | np.ndarray], tokens: Sequence[Sequence[int]]
    ) -> list[Float[np.ndarray, " C"]]:
        """The log-probabilities of several tokens that may follow each of these sequences, in one forward pass: what scoring each
        sequence once for each of its tokens would give."""
        padded, segments = self.padded_rows(rows)
        last, candidates = np.zeros(len(padded), np.int32), np.zeros((len(padded), _power(max(map(len, tokens)))), np.int32)
        for i, (row, some) in enumerate(zip(rows, tokens, strict=True)):
            last[i], candidates[i, : len(some)] = len(row) - 1, some
        logprobs = self.run("the next tokens", _followers, padded, segments, last, candidates)
        return [each[: len(some)] for each, some in zip(np.asarray(logprobs), tokens)]

    def padded_rows(self, rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Sequences of any lengths as one array of a size that a program is compiled for, and their segments."""
        longest = max(map(len, rows))
        shape = (_power(len(rows)), max(longest, min(length_bucket(longest), self.context)))
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], segments[i, : len(row)] = row, 1
        return tokens, segments

    def run(
        self,
        label: str,
        tail: Tail,
        tokens: np.ndarray,
        segments: np.ndarray,
        *more: np.ndarray,
        adapter: "LoadedAdapter | None" = None,
    ) -> Any:
        """The results of a tail on the hidden states of sequences, with the current weights; all of them under this adapter."""
        return self.advance(label, tail, tokens, Packed(jnp.asarray(segments)), None, *more, adapter=adapter)[0]

    def advance(
        self,
        label: str,
        tail: Tail,
        tokens: np.ndarray,
        attend: Attend,
        caches: Caches | None,
        *more: np.ndarray,
        adapter: "LoadedAdapter | None" = None,
    ) -> tuple[Any, Any]:
        """The results of a tail, and the caches after these tokens, in place; with the current weights and under this adapter.

        Args:
            label: name of the computation, for the message while it compiles.
            more: further arguments of the tail.
        """
        if self.adapters is not None:
            extra = self.adapters.sequence_leaves(adapter, *tokens.shape)
        elif adapter is None:
            extra = {}
        else:
            raise ValueError(f"these sequences have no adapters, `{adapter.name}` neither")
        size = (label, tokens.shape, *(a.shape for a in [*jax.tree.leaves(caches), *more]))
        notice = nullcontext()
        if size not in self._sizes:
            notice = telling(self.say, f"compiling {label} of {tokens.shape[0]} x {tokens.shape[1]} tokens")
        with notice, self.on_mesh():
            kind, weights = PassKind(whole_sequences, tail), self.forward.prepared(self.weights())
            out = self.forward(kind, weights, (tokens, attend), caches, more, extra=extra)
        self._sizes.add(size)
        return out


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _logits(model: Any, x: Array) -> Array:
    """Logits [B T V]."""
    return model.unembed(x)


def _scores(model: Any, x: Array, following: Array) -> tuple[Array, Array]:
    """The log-probability of each token that follows [B T], and whether it is the likeliest [B T]."""

    def of(logits: Array, following: Array) -> tuple[Array, Array]:
        following_logits = jnp.take_along_axis(logits, following[:, None], -1)[:, 0]
        return token_logprobs(logits, following), following_logits >= logits.max(-1)

    return map_chunks(model, x, following, of)


def _followers(model: Any, x: Array, last: Array, candidates: Array) -> Array:
    """The log-probabilities [B C] of candidates [B C] after the tokens at these places [B]."""
    x = jnp.take_along_axis(x, last[:, None, None], 1)
    return jnp.take_along_axis(jax.nn.log_softmax(model.unembed(x)[:, 0], -1), candidates, -1)


def map_chunks(model: Any, x: Float[Array, "B T D"], following: Int[Array, "B T"], of: Any) -> Any:
    """The results [B T ...] of `of` on the logits [tokens V] after each token and the tokens that follow them [tokens], with the
    logits of `CHUNK` tokens in memory at a time."""
    count = following.size
    chunk = min(CHUNK, count)
    rest = -count % chunk
    parts = jnp.pad(x.reshape(count, -1), ((0, rest), (0, 0))).reshape(-1, chunk, x.shape[-1])
    targets = jnp.pad(following.reshape(-1), (0, rest)).reshape(-1, chunk)
    results = jax.lax.map(lambda part: of(model.unembed(part[0][None])[0], part[1]), (parts, targets))
    return tuple(a.reshape(-1, *a.shape[2:])[:count].reshape(*following.shape, *a.shape[2:]) for a in results)
