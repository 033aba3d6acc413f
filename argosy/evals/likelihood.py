"""Computes the log-likelihood of continuations.

A context and its continuation are encoded as one text, and divided after as many tokens as the context alone has. Blanks at the end of
the context belong to the continuation, because the token of a word includes the blank before it. Sequences that are longer than the
context window lose tokens at their beginning. Both are as in EleutherAI's lm-evaluation-harness.

Each sequence is computed as a whole, so a context is computed once for each of its choices: 4 times for ARC. If all choices of a task
are single tokens (MMLU), one forward pass gives those of a question.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.forward.sequences import length_batches


@dataclass(frozen=True)
class Pair:
    """The token ids of a context and of its continuation.

    row: the index of the row that they belong to.
    """

    row: int
    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """The score of a continuation.

    logprob: the natural logarithm of its probability.
    greedy: whether each of its tokens is the most likely one. Always False for choices of a single token, where nothing reads it.
    """

    logprob: float
    greedy: bool


class PairScores(NamedTuple):
    """The score of each pair, and the number of pairs that lost tokens at their beginning."""

    likelihoods: list[Likelihood]
    truncated: int


# Called with the number of rows that are done. It may raise an exception to end the evaluation.
Tick = Callable[[int], None]


def pair(lm: Any, row: int, context: str, continuation: str) -> Pair:
    """Encodes a context and its continuation. An empty context becomes the beginning-of-sequence token, or the end-of-sequence token if
    the tokenizer has no other.

    Args:
        row: the index of the row.

    Raises:
        BadInput: the continuation adds no token, or the context is empty and the tokenizer has neither of these tokens.
    """
    prefix = context.rstrip()
    continuation = context[len(prefix) :] + continuation
    if not prefix:
        start = lm.tokenizer.bos if lm.tokenizer.bos is not None else lm.tokenizer.eos
        if start is None:
            raise BadInput("an empty context, and the tokenizer has no token that begins a text", where=f"row {row + 1}")
        before, whole = [start], [start, *lm.tokenizer.encode(continuation)]
    else:
        before, whole = lm.encode(prefix), lm.encode(prefix + continuation)
    if len(whole) <= len(before):
        raise BadInput(f"the continuation {continuation!r} has no token of its own", where=f"row {row + 1}")
    return Pair(row, before, whole[len(before) :])


def chat_pair(lm: Any, row: int, message: str, reply: str) -> Pair:
    """Encodes a user's message, rendered with the model's chat template, and the reply."""
    return Pair(row, lm.chat_prompt([{"role": "user", "content": message}]), lm.tokenizer.encode(reply.lstrip()))


def likelihoods(lm: Any, pairs: Sequence[Pair], batch: int, tick: Tick = lambda _: None) -> PairScores:
    """Scores each pair.

    Args:
        batch: the number of tokens in a forward pass, padding included.
        tick: called with the number of rows of which all pairs are scored.
    """
    # The last token is only a target, so a sequence may have one token more than the context.
    most = lm.config.context + 1
    rows = [(pair.context + pair.continuation)[-most:] for pair in pairs]
    pair_scores: dict[int, Likelihood] = {}
    counter = _RowCounter(pairs, tick)
    sequences = lm.sequences()
    shared = _questions(pairs) if all(len(pair.continuation) == 1 for pair in pairs) else []
    for some in length_batches([len(rows[places[0]]) - 1 for places in shared], batch, lm.config.context):
        group = [shared[i] for i in some]
        firsts = [rows[places[0]][:-1] for places in group]
        logprobs = sequences.followers(firsts, [[pairs[i].continuation[0] for i in places] for places in group])
        for places, each in zip(group, logprobs, strict=True):
            # For choices, nothing reads whether the token is the most likely one of the whole vocabulary.
            pair_scores |= {i: Likelihood(float(logprob), False) for i, logprob in zip(places, each)}
            counter.done(places)
    rest = [i for i in range(len(pairs)) if i not in pair_scores]
    for some in length_batches([len(rows[i]) - 1 for i in rest], batch, lm.config.context):
        places = [rest[i] for i in some]
        for i, scores in zip(places, sequences.scores([rows[i] for i in places]), strict=True):
            length = min(len(pairs[i].continuation), len(scores.logprobs))
            logprob = float(scores.logprobs[-length:].astype(np.float64).sum())
            pair_scores[i] = Likelihood(logprob, bool(scores.greedy[-length:].all()))
        counter.done(places)
    cut = sum(len(pair.context) + len(pair.continuation) > most for pair in pairs)
    return PairScores([pair_scores[i] for i in range(len(pairs))], cut)


def _questions(pairs: Sequence[Pair]) -> list[list[int]]:
    """The indices of the pairs with the same context, for each context that has several pairs."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, pair in enumerate(pairs):
        groups.setdefault((pair.row, tuple(pair.context)), []).append(i)
    return [places for places in groups.values() if len(places) > 1]


class _RowCounter:
    """Counts the rows whose pairs have all been scored."""

    def __init__(self, pairs: Sequence[Pair], tick: Tick):
        self.pairs, self.tick, self.rows = pairs, tick, 0
        self.pairs_left: dict[int, int] = {}
        for pair in pairs:
            self.pairs_left[pair.row] = self.pairs_left.get(pair.row, 0) + 1

    def done(self, places: Sequence[int]) -> None:
        for i in places:
            self.pairs_left[self.pairs[i].row] -= 1
            self.rows += not self.pairs_left[self.pairs[i].row]
        self.tick(self.rows)
