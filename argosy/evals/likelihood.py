"""The log-likelihood of continuations.

A context and its continuation are encoded as one text and divided where the tokens of the context alone end; blanks at the end of the
context belong to the continuation, since tokenizers of this kind put the blank in front of a word into its token. Sequences beyond the
context window lose tokens from the left. Both as EleutherAI's lm-evaluation-harness does.

Each sequence is computed whole, so a context is computed once for each of its choices: 4 times for ARC. Where all choices of a task are
single tokens (MMLU), those of a question are read from one forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.forward.sequences import length_batches


@dataclass(frozen=True)
class Pair:
    """Token ids of a context and of what follows it.

    row: whose they are.
    """

    row: int
    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """The log-probability of a continuation, natural, and whether each of its tokens is the likeliest."""

    logprob: float
    greedy: bool


class PairScores(NamedTuple):
    """The scores of pairs, and how many pairs lost tokens from the left."""

    likelihoods: list[Likelihood]
    truncated: int


# Called with the number of rows that are done; raises to end the evaluation.
Tick = Callable[[int], None]


def pair(lm: Any, row: int, context: str, continuation: str) -> Pair:
    """Token ids of a context and its continuation. An empty context is the beginning-of-sequence token, or the end-of-sequence token
    of a model that has none.

    Raises:
        BadInput: the continuation has no token of its own.
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
    """Token ids of a user's message, rendered with the model's chat template, and of the reply."""
    return Pair(row, lm.chat_prompt([{"role": "user", "content": message}]), lm.tokenizer.encode(reply.lstrip()))


def likelihoods(lm: Any, pairs: Sequence[Pair], batch: int, tick: Tick = lambda _: None) -> PairScores:
    """Scores each pair.

    Args:
        batch: tokens of one forward pass, padding included.
    """
    # Nothing follows the last token, so a sequence may have one more than the context.
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
            # Which token of the whole vocabulary is the likeliest is not asked of choices.
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
    """The places of the pairs of each context that has several."""
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
