"""Beam search: the continuations with the highest scores, as vLLM searches for them.

    beams = Beams(ids, width=4, most=32, ends={2})
    while beams.open:
        beams.take(engine.generate(beams.requests()))
    beams.best()

Each step continues every beam by its `2 * width` likeliest tokens. A token that ends it makes it a complete beam; of the others, the
`width` with the highest scores stay open. The search ends once no open beam can come to a higher score than the best complete ones.

The score of a beam is its log-probability divided by the number of its tokens, the ending one included, to the power of
`length_penalty` (arXiv:1609.08144). vLLM counts the tokens of the prompt too, so short completions score higher there.

A step is a request for one token for each beam. The pages of a beam are found in the prefix cache, except for tokens of its last page.
A model with recurrent layers has no prefix cache: it computes each beam from its first token in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argosy.core.errors import BadInput
from argosy.infer.engine.request import Event, Request
from argosy.infer.sampling.sampler import MOST_TOP


@dataclass(frozen=True)
class Beam:
    """A beam, or a finished completion.

    tokens: its tokens, without the token that ended it.
    logprobs: their log-probabilities, and that of the token that ended it.
    tops: the most likely tokens at each position.
    ended_by: the token that ended it; None: the limit did.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ended_by: int | None = None
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()

    def score(self, penalty: float) -> float:
        return sum(self.logprobs) / max(len(self.logprobs), 1) ** penalty


class Beams:
    """The beams of one prompt.

    Args:
        width: number of beams, at most 10: the engine tells the 20 likeliest tokens.
        most: limit on the tokens of each completion.
        ends: ids that end a completion.

    Raises:
        BadInput: a width out of range.
    """

    def __init__(
        self, prompt: Sequence[int], width: int, most: int, ends: frozenset[int] = frozenset(), length_penalty: float = 1.0
    ):
        if not 1 <= 2 * width <= MOST_TOP:
            raise BadInput(f"{width} beams", hint=f"1 to {MOST_TOP // 2}")
        self.prompt, self.width, self.most, self.ends, self.penalty = list(prompt), width, most, ends, length_penalty
        self.open = [Beam()]
        self.complete: list[Beam] = []

    def requests(self, top: int = 0, **options: Any) -> list[Request]:
        """One for each open beam: its next token with the likeliest ones.

        Args:
            top: likeliest tokens to keep, if more than the search needs.
            options: further fields of the requests, such as `adapter` and `salt`.
        """
        top = max(2 * self.width, top)
        return [Request([*self.prompt, *beam.tokens], 1, top=top, **options) for beam in self.open]

    def take(self, answers: Sequence[Sequence[Event]]) -> None:
        """Continues the beams by the completions to `requests`."""
        grown: list[Beam] = []
        for beam, events in zip(self.open, answers, strict=True):
            for token, logprob in events[0].top[: 2 * self.width]:
                logprobs, tops = (*beam.logprobs, logprob), (*beam.tops, events[0].top)
                if token in self.ends:
                    self.complete.append(Beam(beam.tokens, logprobs, token, tops))
                else:
                    grown.append(Beam((*beam.tokens, token), logprobs, None, tops))
        self.open = sorted(grown, key=self._score, reverse=True)[: self.width]
        if self.open and len(self.open[0].tokens) == self.most:
            self.complete, self.open = [*self.complete, *self.open], []
        self.complete = self.best()
        if len(self.complete) == self.width and all(self._bound(beam) <= self._score(self.complete[-1]) for beam in self.open):
            self.open = []

    def best(self) -> list[Beam]:
        """The complete beams with the highest scores, best first."""
        return sorted(self.complete, key=self._score, reverse=True)[: self.width]

    def _score(self, beam: Beam) -> float:
        return beam.score(self.penalty)

    def _bound(self, beam: Beam) -> float:
        """The highest score that continuing a beam may come to: more tokens never raise its log-probability."""
        longest = self.most if self.penalty > 0 else len(beam.tokens) + 1
        return sum(beam.logprobs) / longest**self.penalty
