"""The forward pass over whole sequences: logits, and the log-probability of each token. A pass may run under one of an engine's
adapters (`infer.engine.adapters`), which is an input of the program, so an adapter compiles nothing.

Sequences of similar length share a forward pass (`length_batches`). Lengths and numbers of sequences are padded to a few sizes, because
each combination is a program that takes seconds to compile.
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
# Number of tokens whose logits are in memory at a time while sequences are scored: 128 MB for a vocabulary of 128k.
CHUNK = 256
# Tokens of one forward pass over several sequences, padding included. Measured on two CPU cores with sequences of 24 to 120 tokens: a
# model of 260k parameters scores 42 to 47 thousand tokens/s for 1024 to 8192, and 10 to 14 thousand one sequence at a time. A model of
# 135M scores 232, 220 and 167 tokens/s for 1024, 2048 and 4096, since larger batches hold more padding, and 135 one at a time.
BATCH = 2048


class TokenScores(NamedTuple):
    """Scores of the tokens of one sequence, from the second on.

    logprobs: the log-probability of each token, given the tokens before it.
    greedy: whether each token is the likeliest at its position.
    """

    logprobs: Float[np.ndarray, " S"]
    greedy: Bool[np.ndarray, " S"]


def length_bucket(length: int, shortest: int = SHORTEST) -> int:
    """The smallest length of at least `length` tokens that programs are compiled for: powers of two, and the midpoints between them."""
    size = shortest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def length_batches(lengths: Sequence[int], tokens: int, context: int) -> Iterator[list[int]]:
    """Divides sequences into batches of at most `tokens` tokens, padding included, the longest sequences first. A sequence longer than
    `tokens` is a batch of its own. Yields the indices of the sequences of each batch.

    All batches but the last have the largest power of two of sequences that fits, so each padded length needs one program or two.

    Args:
        lengths: tokens of each sequence.
        context: the model's context, which padded lengths do not exceed.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    at = 0
    while at < len(order):
        longest = min(length_bucket(lengths[order[at]]), context)
        count = 1 << max(tokens // longest, 1).bit_length() - 1
        yield order[at : at + count]
        at += count


class SequenceScorer:
    """Runs one model over whole sequences. The structure of the model is fixed here; its weights are read at each call.

    Args:
        model: a module. Splitting it takes 15 ms for 270 weights, so `infer.engine.cached_engine` reuses this object while the
            structure does not change.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second.
        adapters: the adapters that `run` and `advance` may use.
        whole: whether the engine with these adapters, if it is built later, runs the model as one program, even on a CPU.

    specs: the specs of the caches that `advance` takes.
    """

    def __init__(self, model: Any, say: Say | None = None, adapters: "Adapters | None" = None, *, whole: bool = False):
        self.say, self.dtype, self.context, self.adapters = say, model.dtype, model.config.context, adapters
        self.graph, weights = split(model)
        self.variables = {address: variable(model, address) for address in weights}
        self.home, stacked, local = weights_home(weights), model.layers.run.stacked, is_on_one_cpu(weights)
        if adapters is None:
            views = False
        elif adapters.base:
            # The factors are laid out for the engine's forward pass, so this one has the same layout of layers.
            views = set(adapters.base.values()) != set(weights)
        else:
            views = local and stacked and not whole
        preparation = WeightPreparation(model, views=views)
        # Scanned layers are compiled as one program in any case.
        if local and (views or not stacked):
            self.forward: Forward = ByLayer(model, adapters, together=1, preparation=preparation)
        else:
            self.forward = OneProgram(model, adapters, preparation=preparation)
        self.specs: Specs = self.forward.specs
        self._sizes: set[tuple[Any, ...]] = set()

    def weights(self) -> Leaves:
        """The current weights, by parameter name."""
        return {address: v.get_value() for address, v in self.variables.items()}

    def on_mesh(self) -> Any:
        """A context manager for tracing programs over the mesh; it does nothing on one device."""
        mesh = home_mesh(self.home)
        return nullcontext() if mesh is None else scope(mesh)

    def padded(self, ids: Int[np.ndarray, "B T"]) -> tuple[np.ndarray, np.ndarray]:
        """Pads sequences to a length that programs are compiled for. Returns the padded ids and the attention mask (1: a token, 0:
        padding)."""
        T = ids.shape[1]
        width = ((0, 0), (0, max(T, min(length_bucket(T), self.context)) - T))
        return np.pad(ids.astype(np.int32), width), np.pad(np.ones_like(ids, np.int32), width)

    def logits(self, ids: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
        """The logits at every token, with causal attention."""
        return np.asarray(self.run("logits", _logits, *self.padded(ids)))[:, : ids.shape[1]]

    def scores(self, rows: Sequence[Sequence[int] | np.ndarray], adapter: "LoadedAdapter | None" = None) -> list[TokenScores]:
        """Scores each token of these sequences given the tokens before it, in one forward pass. A sequence may have one token more than
        the context, because the last token is only predicted, not computed.

        Args:
            rows: the token ids of each sequence.
            adapter: the adapter for all of them; None: the model alone.
        """
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
        """The log-probabilities of several candidates for the next token of each sequence, in one forward pass.

        Args:
            rows: the token ids of each sequence.
            tokens: the candidates for each sequence.
        """
        padded, segments = self.padded_rows(rows)
        last, candidates = np.zeros(len(padded), np.int32), np.zeros((len(padded), _power(max(map(len, tokens)))), np.int32)
        for i, (row, some) in enumerate(zip(rows, tokens, strict=True)):
            last[i], candidates[i, : len(some)] = len(row) - 1, some
        logprobs = self.run("the next tokens", _followers, padded, segments, last, candidates)
        return [each[: len(some)] for each, some in zip(np.asarray(logprobs), tokens)]

    def padded_rows(self, rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Pads sequences of any lengths into one array [B T] of a size that programs are compiled for. Returns the ids and the
        attention mask (1: a token, 0: padding)."""
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
        """Runs a forward pass over padded sequences with the current weights, and returns the results of its tail.

        Args:
            label: name of the computation, for the message while it compiles.
            tail: the function of the last hidden states (`PassKind`).
            tokens, segments: token ids and attention mask, as `padded_rows` returns them.
            more: further arrays for the tail.
            adapter: the adapter for all sequences; None: the model alone.
        """
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
        """As `run`, for tokens that continue the sequences in `caches`. Also returns the caches, which are updated in place.

        Args:
            attend: the attention strategy, with the positions of the tokens.
            caches: the caches of the tokens before; None: there are none.
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
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _logits(model: Any, x: Array) -> Array:
    """Logits [B T V]."""
    return model.unembed(x)


def _scores(model: Any, x: Array, following: Array) -> tuple[Array, Array]:
    """The log-probability of each following token [B T], and whether it is the likeliest [B T]."""

    def of(logits: Array, following: Array) -> tuple[Array, Array]:
        following_logits = jnp.take_along_axis(logits, following[:, None], -1)[:, 0]
        return token_logprobs(logits, following), following_logits >= logits.max(-1)

    return map_chunks(model, x, following, of)


def _followers(model: Any, x: Array, last: Array, candidates: Array) -> Array:
    """The log-probabilities [B C] of candidates [B C] for the token after position `last` [B]."""
    x = jnp.take_along_axis(x, last[:, None, None], 1)
    return jnp.take_along_axis(jax.nn.log_softmax(model.unembed(x)[:, 0], -1), candidates, -1)


def map_chunks(model: Any, x: Float[Array, "B T D"], following: Int[Array, "B T"], of: Any) -> Any:
    """Applies a function to the logits of all tokens, with the logits of `CHUNK` tokens in memory at a time. Returns its results,
    [B T ...] each.

    Args:
        x: the last hidden states.
        following: the token that follows each token.
        of: (logits [tokens V], following tokens [tokens]) -> a tuple of arrays [tokens ...].
    """
    count = following.size
    chunk = min(CHUNK, count)
    rest = -count % chunk
    parts = jnp.pad(x.reshape(count, -1), ((0, rest), (0, 0))).reshape(-1, chunk, x.shape[-1])
    targets = jnp.pad(following.reshape(-1), (0, rest)).reshape(-1, chunk)
    results = jax.lax.map(lambda part: of(model.unembed(part[0][None])[0], part[1]), (parts, targets))
    return tuple(a.reshape(-1, *a.shape[2:])[:count].reshape(*following.shape, *a.shape[2:]) for a in results)
