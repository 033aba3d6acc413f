"""A request to an engine, and the events that the engine returns for it."""

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

    tokens: the token ids of the prompt.
    max_tokens: the most tokens of the completion.
    sampling: the settings of sampling.
    stop_tokens: token ids that end the completion.
    seed, row: folded into one random stream, as in `infer.sampling.sample.random_streams`.
    top: number of likeliest tokens to return with each token, at most 20.
    priority: requests with a lower number run first.
    salt: prompts share cached pages only if they have the same salt.
    grammar: the grammar that the completion must match; None: none. The completion ends with reason `stop` once it matches and no token
        may follow. It may fall short of a match if it ends by `length`, or by an end token that is text.
    adapter: the name of a loaded adapter (`Engine.load_adapter`); None: the model alone.
    repetition: the repetition that ends the completion; None: none does.
    inputs: the prompt's inputs besides token ids: replaced embeddings, and rotary positions with several axes.
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
        """Checks that a model with this vocabulary and context can run the request.

        Raises:
            BadInput: the prompt is empty, has ids outside the vocabulary or fills the context, `max_tokens` is below 1, or `top` is out
                of range.
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

    id: the request's id, as `Engine.add` returned it.
    token: the new token; None if the request was aborted, or its completion ended without a token.
    logprob: the token's log-probability by the model alone, before bias, mask, penalties, temperature and filters.
    finish_reason: why the completion ended; None if it has not. With `stop`, `token` is the token that ended it, if one did. `blocked`:
        no token was allowed, because all that the grammar allows are banned, or the grammar has become too complex. `repetition`: the
        completion repeats itself.
    drawn: the token's log-probability in the distribution that it was drawn from; 0 at temperature 0.
    top: the likeliest tokens with their log-probabilities, descending, if the request asks for them.
    reused: number of prompt tokens found in the prefix cache.
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

    steps: steps that were dispatched.
    prompt_tokens: prompt tokens that were computed, which excludes those found in the prefix cache.
    reused_tokens: prompt tokens that were found in the prefix cache.
    drawn_tokens: tokens that were sampled.
    compilations: programs that were compiled.
    compile_seconds: seconds spent compiling, or in `warm_up`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    drawn_tokens: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
