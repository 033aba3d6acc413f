"""One completion while it is generated: its text, log-probabilities and finish reason, independent of the API's formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from argosy.infer.detokenize import Detokenizer
from argosy.infer.engine.request import Event
from argosy.infer.prompt_logprobs import PromptScores

# Written in place of minus infinity, which JSON lacks, as in vLLM.
LEAST_LOGPROB = -9999.0
# Number of tokens at either end of a prompt that are decoded before its completion.
EDGE = 64


@dataclass(frozen=True)
class StopConditions:
    """The conditions that end a completion besides its length, and options for decoding its text.

    stops: the stop strings.
    stop_tokens: the stop tokens that the request named.
    eos: the end-of-sequence token; None: the completion continues after it.
    least: number of tokens before a stop string counts.
    include: whether the text keeps the stop string or stop token that ended it.
    skip_special: whether special tokens are left out of the text.
    marks: texts of some special tokens, which are not left out.
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

    logprob: the log-probability by the model alone, before sampling settings.
    likeliest: (token, logprob) of the likeliest tokens, descending.
    rank: for tokens of prompts, the rank by probability; 1: the likeliest.
    """

    token: int
    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()
    rank: int = 0


@dataclass
class ChoicePiece:
    """The text and the token that a step added to a completion.

    text: the new text, in whole characters.
    tokens: the new token, or none.
    finish: the finish reason; None: the completion has not ended.
    """

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None


class CompletionChoice:
    """One completion of a prompt, as it grows.

    tokens: all tokens, including the one that ended it.
    pieces: the text that each event added.
    finish: the finish reason; None: it has not ended.
    stop_reason: the stop string or stop token that ended it. As in vLLM, None if the end-of-sequence token or the length did.

    Args:
        ending: the stop conditions.
        begun: whether the first token keeps its leading space whatever the prompt is.
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
        """Adds an event: a token, the end of the completion, or both. Returns what it added."""
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
    """Cuts the middle out of a long prompt. Decoding a completion depends only on whether text came before, and on the prompt's last
    bytes. Decoding all of a prompt would take a second for each million tokens, `n` times."""
    return prompt if len(prompt) <= 2 * EDGE else [*prompt[:EDGE], *prompt[-EDGE:]]


def _likeliest(event: Event) -> list[tuple[int, float]]:
    return [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in event.top]


def scored_prompt(ids: Sequence[int], scores: PromptScores, top: int) -> list[ScoredToken]:
    """The tokens of a prompt from the second on, each with the `top` likeliest tokens at its position."""
    likeliest = zip(scores.ids[:, :top].tolist(), scores.likeliest[:, :top].tolist(), strict=True)
    rows = zip(ids[1:], scores.logprobs.tolist(), likeliest, scores.ranks.tolist(), strict=True)
    return [
        ScoredToken(token, max(logprob, LEAST_LOGPROB), [(other, max(p, LEAST_LOGPROB)) for other, p in zip(*top)], rank)
        for token, logprob, top, rank in rows
    ]


def _speaking(tokenizer: Any, ending: StopConditions) -> Any:
    """The tokenizer, wrapped so that it decodes special tokens as `ending` says."""
    return SimpleNamespace(stream=lambda: tokenizer.stream(ending.skip_special, ending.marks))


class TokenNames:
    """The texts by which lists of log-probabilities name tokens.

    Args:
        as_ids: whether to write every token as `token_id:17`, which distinguishes tokens with the same text.
    """

    def __init__(self, tokenizer: Any, as_ids: bool):
        self.tokenizer, self.as_ids = tokenizer, as_ids or tokenizer is None

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.bytes(token).decode("utf-8", "replace")

    def bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.piece(token, False)

    def prompt_logprobs(self, ids: Sequence[int], scores: PromptScores, top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token of a prompt, its own entry and those of the `top` likeliest tokens; null for the
        first."""
        per_token: list[dict[str, Any] | None] = [None]
        for scored in scored_prompt(ids, scores, top):
            others = ((t, p, i) for i, (t, p) in enumerate(scored.likeliest, 1) if t != scored.token)
            entries = [(scored.token, scored.logprob, scored.rank), *others]
            per_token.append({str(t): {"logprob": p, "rank": r, "decoded_token": self(t)} for t, p, r in entries})
        return per_token
