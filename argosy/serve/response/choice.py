"""One answer while it is generated: tokens to text, log-probabilities, and why it ended. Nothing here knows a shape of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from argosy.infer.detokenize import Detokenizer
from argosy.infer.engine.request import Event
from argosy.infer.prompt_logprobs import PromptScores

# JSON has no minus infinity. vLLM writes this.
LEAST_LOGPROB = -9999.0
# Tokens at either end of a prompt that are read before its answer.
EDGE = 64


@dataclass(frozen=True)
class StopConditions:
    """The conditions that end a completion besides its length, and how its text is written.

    stops: strings.
    stop_tokens: ids that the request named.
    eos: the model's own end-of-sequence token, None if the answer goes on after it.
    least: tokens before a stop string counts.
    include: the text keeps what ended it.
    skip_special: special tokens are no text.
    marks: texts of some special tokens, which are text nevertheless.
    """

    stops: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    eos: int | None = None
    least: int = 0
    include: bool = False
    skip_special: bool = True
    marks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability.

    logprob: the log-probability by the model itself, before sampling settings.
    likeliest: (token, logprob) of the most likely tokens, descending.
    rank: rank of a prompt's token; 1 is the most likely.
    """

    token: int
    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()
    rank: int = 0


@dataclass
class ChoicePiece:
    """The text and the token that a step added to a completion.

    finish: why the answer has ended, None if it has not.
    """

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None


class CompletionChoice:
    """An answer to a prompt.

    tokens: all its tokens, with the one that ended it.
    stop_reason: the stop string or the stop token that ended it; None for the end-of-sequence token and for the length, as in vLLM.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], ending: StopConditions, *, begun: bool = False):
        self.ending = ending
        self.tokens: list[ScoredToken] = []
        self.pieces: list[str] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        whole = tokenizer if tokenizer is None else _speaking(tokenizer, ending)
        self._text = Detokenizer(whole, _ends_of(prompt), ending.stops, include_stop=ending.include, begun=begun)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, event: Event) -> ChoicePiece:
        """Adds the token of an event, or its end."""
        assert self.finish is None
        if event.token is None:
            self.finish, text = event.finish_reason, self._text.end()
            if self._text.stopped is not None:
                self.finish, self.stop_reason = "stop", self._text.stopped
            self.pieces.append(text)
            return ChoicePiece(text, [], self.finish)
        token = ScoredToken(event.token, max(event.logprob, LEAST_LOGPROB), _likeliest(event))
        self.tokens.append(token)
        ended_by_token = event.finish_reason == "stop"
        text = ""
        if not ended_by_token or self.ending.include:
            text = self._text.push(event.token, may_stop=len(self.tokens) > self.ending.least)
        if event.finish_reason is not None:
            text += self._text.end()
        self.finish = event.finish_reason
        if self._text.stopped is not None:
            self.finish, self.stop_reason = "stop", self._text.stopped
        elif ended_by_token and event.token != self.ending.eos:
            self.stop_reason = event.token
        self.pieces.append(text)
        return ChoicePiece(text, [token], self.finish)


def _ends_of(prompt: Sequence[int]) -> Sequence[int]:
    """A long prompt without its middle: how its answer decodes depends on whether text came before, and on its last bytes. Reading
    all of it would take a second for each million tokens times n."""
    return prompt if len(prompt) <= 2 * EDGE else [*prompt[:EDGE], *prompt[-EDGE:]]


def _likeliest(event: Event) -> list[tuple[int, float]]:
    return [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in event.top]


def scored_prompt(ids: Sequence[int], scores: PromptScores, top: int) -> list[ScoredToken]:
    """The tokens of a prompt from its second on, with `top` likeliest tokens each."""
    likeliest = zip(scores.ids[:, :top].tolist(), scores.likeliest[:, :top].tolist(), strict=True)
    rows = zip(ids[1:], scores.logprobs.tolist(), likeliest, scores.ranks.tolist(), strict=True)
    return [
        ScoredToken(token, max(logprob, LEAST_LOGPROB), [(other, max(p, LEAST_LOGPROB)) for other, p in zip(*top)], rank)
        for token, logprob, top, rank in rows
    ]


def _speaking(tokenizer: Any, ending: StopConditions) -> Any:
    """The tokenizer, with the special tokens as text that the ending says."""
    return SimpleNamespace(stream=lambda: tokenizer.stream(ending.skip_special, ending.marks))


class TokenNames:
    """Tokens as the text that log-probabilities show.

    Args:
        as_ids: `token_id:17` for every token, so that tokens with the same text can be told apart.
    """

    def __init__(self, tokenizer: Any, as_ids: bool):
        self.tokenizer, self.as_ids = tokenizer, as_ids or tokenizer is None

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.bytes(token).decode("utf-8", "replace")

    def bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.piece(token, False)

    def prompt_logprobs(self, ids: Sequence[int], scores: PromptScores, top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token of a prompt its own entry and those of the likeliest; null for the first."""
        per_token: list[dict[str, Any] | None] = [None]
        for scored in scored_prompt(ids, scores, top):
            others = ((t, p, i) for i, (t, p) in enumerate(scored.likeliest, 1) if t != scored.token)
            entries = [(scored.token, scored.logprob, scored.rank), *others]
            per_token.append({str(t): {"logprob": p, "rank": r, "decoded_token": self(t)} for t, p, r in entries})
        return per_token
