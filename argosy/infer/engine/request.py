"""A request to an engine, and the events that it gets."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.infer.engine.prompt_inputs import PromptInputs
from argosy.infer.sampling.repetition import Repetition
from argosy.infer.sampling.sample import Sampling, Seed
from argosy.infer.sampling.sampler import MOST_TOP
from argosy.infer.tools.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "blocked", "repetition"]


@dataclass
class Request:
    """One prompt, and how to complete it.

    tokens: prompt ids.
    max_tokens: limit on the tokens of the completion.
    sampling: how its tokens are chosen.
    stop_tokens: ids that end the completion.
    seed, row: folded into one random stream, as in `infer.sampling.sample.random_streams`.
    top: number of likeliest tokens to return with each token, at most 20.
    priority: lower runs first.
    salt: prompts share cached pages only under the same salt.
    grammar: the completion matches it, unless it ends too early by `length` or an end token that is text. It ends by `stop` once it is
        complete and nothing may follow.
    adapter: the name of a loaded adapter (`Engine.load_adapter`); None: the model alone.
    repetition: ends a completion that repeats itself.
    inputs: what the prompt has besides its ids: embeddings at some places, rotary positions with several axes.
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    seed: Seed = 0
    row: int = 0
    top: int = 0
    priority: int = 0
    salt: str = ""
    grammar: Grammar | None = None
    adapter: str | None = None
    repetition: Repetition | None = None
    inputs: PromptInputs | None = None

    def check(self, vocab: int, context: int) -> None:
        """Checks it against a model.

        Raises:
            BadInput: an empty prompt, ids outside the vocabulary, a prompt that fills the context, no tokens to sample, too many
                likeliest tokens.
        """
        ids = self.tokens
        if not ids:
            raise BadInput("an empty prompt")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise BadInput(f"token id {wrong} is outside the model's vocabulary of {vocab}")
        if len(ids) >= context:
            raise BadInput(f"a prompt of {plural(len(ids), 'token')} leaves no room in a context of {context}", hint="shorten it")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens = {self.max_tokens}", hint="at least 1")
        if not 0 <= self.top <= MOST_TOP:
            raise BadInput(f"top = {self.top} likeliest tokens", hint=f"0 to {MOST_TOP}")


class Event(NamedTuple):
    """A new token of a request, its end, or both.

    id: the request's number.
    token: the token; None if the request was aborted, or its grammar ended the completion.
    logprob: the model's own, before bias, mask, penalties, temperature and filters.
    finish_reason: why the completion ended; None if it has not. The token that ended it by `stop` is the event's token. `blocked`: no
        token is left, because those that the grammar allows are banned, or the grammar has become too complex. `repetition`: the
        completion repeats itself.
    drawn: the log-probability in the distribution that the token was drawn from; 0 at temperature 0.
    top: the likeliest tokens and their log-probabilities, if the request wants them.
    reused: prompt tokens found in the prefix cache.
    """

    id: int
    token: int | None
    logprob: float
    finish_reason: FinishReason | None
    drawn: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    reused: int = 0


@dataclass
class EngineStats:
    """Counts since the engine was made.

    steps: steps of the model.
    prompt_tokens: tokens of prompts that were computed or copied.
    reused_tokens: tokens of prompts that were found in the prefix cache.
    drawn_tokens: tokens that were sampled.
    compilations: programs that were compiled.
    compile_seconds: what that took.
    """

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    drawn_tokens: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
