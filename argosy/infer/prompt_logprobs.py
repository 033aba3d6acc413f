"""Scores the tokens of prompts, with the likeliest tokens at each position, while an engine runs other requests.

A forward pass cannot be interrupted, so it has at most `PASS` tokens, which bounds how long running completions wait. Short prompts of
one padded length share a pass, without the engine's KV cache. A longer prompt takes several passes, with its own KV cache, and the
engine steps between them. Each padded length (`sequences.length_bucket`) needs one program, and a second one for full batches.
`compile` compiles them in any thread.

With an engine's adapters, all prompts of a pass have the same adapter, or none. The factors are inputs of the program, so an adapter
compiles nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.progress import Say
from argosy.infer.engine.adapters import Adapters, LoadedAdapter
from argosy.infer.engine.cache import allocate_caches
from argosy.infer.forward.sequences import SequenceScorer, length_bucket, map_chunks
from argosy.infer.placement import home_mesh
from argosy.infer.sampling.sample import likeliest
from argosy.infer.sampling.sampler import MOST_TOP
from argosy.models.parts.attention.attend import Contiguous
from argosy.models.parts.attention.cache import Caches, constrain_caches, contiguous

# Tokens of one pass, padding included. SmolLM2 135M takes half a second for them on two CPU cores.
PASS = 256


class PromptScores(NamedTuple):
    """The scores of the tokens of one prompt, from the second token on, because no token is before the first.

    logprobs: the log-probability of each token (natural logarithm).
    ranks: the rank of each token by probability; 1: the likeliest.
    ids: the likeliest tokens at each position, descending.
    likeliest: the log-probabilities of `ids`.
    """

    logprobs: Float[np.ndarray, " S"]
    ranks: Int[np.ndarray, " S"]
    ids: Int[np.ndarray, "S K"]
    likeliest: Float[np.ndarray, "S K"]


# The scores of a prompt of one token.
NOTHING = PromptScores(np.zeros(0), np.zeros(0, int), np.zeros((0, 0), int), np.zeros((0, 0)))


class PromptScorer:
    """Scores prompts with one model. `score` is called by the thread that steps the engine, `compile` by any.

    Args:
        longest: tokens of the longest prompt.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second.
        adapters: the engine's adapters; None: it has none.
    """

    def __init__(self, model: Any, longest: int, say: Say | None = None, adapters: Adapters | None = None):
        self.sequences, self.longest = SequenceScorer(model, say, adapters), longest
        self._specs = self.sequences.specs
        self.compilations = 0
        self._compiled: set[tuple[int, int]] = set()
        self._empties: dict[int, Callable[[], Caches]] = {}
        self._lock = Lock()
        self._long: _Long | None = None

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yields the sizes (rows, length) of every pass that there may be."""
        length = 0
        while length < self._padded(self.longest):
            length = self._padded(length + 1)
            yield 1, length
            if (rows := self._rows(length)) > 1:
                yield rows, length

    def sizes_of(self, prompts: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
        """The sizes (rows, length) of all passes that these prompts may be part of, whichever other prompts are scored with them."""
        lengths = [self._padded(len(ids) - 1) for ids in prompts if len(ids) > 1]
        rows = {length: self._rows(length) for length in lengths}
        many = {(rows[length], length) for length in lengths if lengths.count(length) > rows[length] // 2}
        return {(1, length) for length in lengths} | many

    def missing(self, prompts: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
        """The program sizes (`sizes_of`) that these prompts need and that are not compiled yet."""
        return self.sizes_of(prompts) - self._compiled

    def compile(self, sizes: Iterable[tuple[int, int]]) -> int:
        """Compiles the programs of these sizes that are not compiled yet, which takes seconds each. Returns how many were compiled."""
        count = 0
        with self._lock:
            for rows, length in sizes:
                if (rows, length) not in self._compiled:
                    self._compile(rows, length)
                    self._compiled.add((rows, length))
                    count += 1
            self.compilations += count
        return count

    def _compile(self, rows: int, length: int) -> None:
        sequences = self.sequences
        if length <= PASS:
            self._scored([[0] * (length + 1)] * rows)
            return
        blank = np.zeros((1, PASS), np.int32)
        caches = self._empty(length)
        sequences.advance("prompts", _scored, blank, Contiguous(jnp.asarray(blank), jnp.asarray(blank > 0)), caches, blank)

    def _empty(self, length: int) -> Caches:
        def empty() -> Caches:
            return contiguous(self._specs, 1, length, self.sequences.dtype)

        home = self.sequences.home
        if home_mesh(home) is None:
            return allocate_caches(self._specs, home, empty)
        with self.sequences.on_mesh():
            # Kept by length, because a new function would be compiled again for each long prompt.
            if length not in self._empties:
                self._empties[length] = jax.jit(lambda: constrain_caches(self._specs, empty()))
            return self._empties[length]()

    def batch(self, prompts: Sequence[Sequence[int]], under: Sequence[LoadedAdapter | None] | None = None) -> list[int]:
        """The indices of the prompts that the next pass scores. It is the first prompt alone, or together with others of the same
        padded length and adapter if these fill more than half of a batch.

        Args:
            under: the adapter of each prompt; None: no prompt has one.
        """
        adapters = [None] * len(prompts) if under is None else under
        length = self._padded(len(prompts[0]) - 1)
        rows = self._rows(length)
        alike = [
            self._padded(len(ids) - 1) == length and adapter == adapters[0]
            for ids, adapter in zip(prompts, adapters, strict=True)
        ]
        places = [i for i, same in enumerate(alike) if same][:rows]
        return places if len(places) > rows // 2 and (rows, length) in self._compiled else [0]

    def score(self, prompts: Sequence[Sequence[int]], adapter: LoadedAdapter | None = None) -> list[PromptScores] | None:
        """Runs one pass. Returns the scores of the prompts, or None if a long prompt needs another pass: then call it again with the
        same prompt. The passes of a long prompt are kept until another long prompt begins. Programs that `compile` has not compiled are
        compiled here.

        Args:
            prompts: the prompts that `batch` chose.
            adapter: the adapter of all these prompts. The caller must have registered its use (`Adapters.use`).
        """
        length = self._padded(max(len(ids) for ids in prompts) - 1)
        rows = 1 if len(prompts) == 1 else self._rows(length)
        if (rows, length) not in self._compiled:
            self.compile({(rows, length)})
        if length > PASS:
            scores = self._one_more_pass(prompts[0], length, adapter)
            return None if scores is None else [scores]
        return self._scored([*prompts, *[[]] * (rows - len(prompts))], adapter)[: len(prompts)]

    def forget(self, prompts: Iterable[Sequence[int]] | None = None) -> None:
        """Frees the KV cache of a long prompt that is partly scored.

        Args:
            prompts: prompts whose scores nobody waits for any more; None: any prompt, because the weights have changed. A prompt that
                is passed to `score` again is then scored from its first token.
        """
        if self._long is not None and (prompts is None or any(ids is self._long.ids for ids in prompts)):
            self._long = None

    def _one_more_pass(self, ids: Sequence[int], length: int, adapter: LoadedAdapter | None) -> PromptScores | None:
        if self._long is None or self._long.ids is not ids:
            self._long = None  # frees its cache before the next one is allocated
            self._long = _Long(ids, self._empty(length))
        long, sequences = self._long, self.sequences
        at = PASS * len(long.scores)
        tokens, following, live = np.zeros((1, PASS), np.int32), np.zeros((1, PASS), np.int32), np.zeros((1, PASS), bool)
        count = min(PASS, len(ids) - 1 - at)
        tokens[0, :count], following[0, :count], live[0, :count] = ids[at : at + count], ids[at + 1 : at + count + 1], True
        places = np.arange(at, at + PASS, dtype=np.int32)[None]
        attend = Contiguous(jnp.asarray(places), jnp.asarray(live))
        outputs, long.caches = sequences.advance("prompts", _scored, tokens, attend, long.caches, following, adapter=adapter)
        long.scores.append([np.asarray(a)[0, :count] for a in outputs])
        if at + count < len(ids) - 1:
            return None
        self._long = None
        return PromptScores(*(np.concatenate(parts) for parts in zip(*long.scores)))

    def _padded(self, length: int) -> int:
        # The last length is the model's context.
        return min(length_bucket(max(length, 1)), self.sequences.context)

    @staticmethod
    def _rows(length: int) -> int:
        """The number of prompts of this length that share a pass, a power of two."""
        return 1 << max(PASS // length, 1).bit_length() - 1

    def _scored(self, rows: Sequence[Sequence[int]], adapter: LoadedAdapter | None = None) -> list[PromptScores]:
        sequences = self.sequences
        length = self._padded(max(map(len, rows)) - 1)
        tokens, segments, following = (np.zeros((len(rows), length), np.int32) for _ in range(3))
        for i, row in enumerate(rows):
            count = max(len(row) - 1, 0)
            tokens[i, :count], segments[i, :count], following[i, :count] = row[:count], 1, row[1:]
        outputs = sequences.run("prompts", _scored, tokens, segments, following, adapter=adapter)
        arrays = [np.asarray(a) for a in outputs]
        return [PromptScores(*(a[i, : max(len(row) - 1, 0)] for a in arrays)) for i, row in enumerate(rows)]


@dataclass
class _Long:
    """A prompt that takes several passes.

    ids: its token ids.
    caches: the KV cache of the tokens computed so far.
    scores: the results of each pass so far.
    """

    ids: Sequence[int]
    caches: Caches
    scores: list[list[np.ndarray]] = field(default_factory=list)


def _of_logits(logits: Array, following: Array) -> tuple[Array, ...]:
    """Log-probabilities and ranks of the following tokens [tokens]; the likeliest tokens and their log-probabilities [tokens K]."""
    target_logits = jnp.take_along_axis(logits, following[:, None], -1)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    top, ids = likeliest(logits, MOST_TOP)
    return (target_logits - total)[:, 0], 1 + (logits > target_logits).sum(-1), ids, top - total


def _scored(model: Any, x: Array, following: Array) -> tuple[Array, ...]:
    """Log-probabilities and ranks of the following tokens [B T]; the likeliest tokens and their log-probabilities [B T K]."""
    return map_chunks(model, x, following, _of_logits)
