"""Beam search: the continuations with the highest scores, as vLLM searches for them.

    beams = Beams(ids, width=4, most=32, ends={2})
    while beams.open:
        beams.take(engine.generate(beams.requests()))
    beams.best()

Each step continues every open beam by each of its `2 * width` likeliest tokens. A continuation that ends with an end token is complete.
The `width` other beams with the highest scores stay open. The search ends once no open beam can reach a higher score than the best
`width` complete beams.

The score of a beam is its log-probability divided by the number of its tokens to the power of `length_penalty` (arXiv:1609.08144). The
end token counts. vLLM counts the tokens of the prompt too, so short completions score higher there.

A step sends one request for each open beam, for a single token. The full pages of a beam are found in the prefix cache. A model with
recurrent layers has no prefix cache, so it computes each beam from its first token in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argosy.core.errors import BadInput
from argosy.infer.engine.request import Event, Request
from argosy.infer.sampling.sampler import MOST_TOP


@dataclass(frozen=True)
class Beam:
    """A beam: a partial or a complete completion.

    tokens: its token ids, without the end token.
    logprobs: the log-probability of each token, and then of the end token if there is one.
    ended_by: the end token; None: the beam is open, or was ended by the limit on its length.
    tops: the likeliest tokens at each position, with their log-probabilities.
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
        width: number of beams, at most 10, because the engine returns at most the 20 likeliest tokens.
        most: the most tokens of each completion.
        ends: token ids that end a completion.
        length_penalty: the power of the number of tokens by which log-probabilities are divided; above 0 it favors long completions.

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
        """A request for each open beam, for one token and the likeliest tokens in its place.

        Args:
            top: number of likeliest tokens to return, if more than the search needs.
            options: further fields of the requests, such as `adapter` and `salt`.
        """
        top = max(2 * self.width, top)
        return [Request([*self.prompt, *beam.tokens], 1, top=top, **options) for beam in self.open]

    def take(self, answers: Sequence[Sequence[Event]]) -> None:
        """Continues the open beams.

        Args:
            answers: the events of each request of `requests`, in order.
        """
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
        """The highest score that continuations of an open beam can reach, because more tokens never raise its log-probability."""
        longest = self.most if self.penalty > 0 else len(beam.tokens) + 1
        return sum(beam.logprobs) / longest**self.penalty
