"""Answers to prompts, sampled by the engine with the weights of the moment.

Every rollout has random streams of its own: the run's seed, the number of the rollout and the place of the answer decide them, and
nothing else does. The end-of-sequence token is part of an answer and is learned, because without it stopping is never learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from argosy.core.errors import ArgosyError
from argosy.data.rows.prompts import Prompt
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.rewards.thoughts import opens_thought, text_with_thoughts

# Kinds of random streams of a run, which never overlap.
ROLLOUT, EVALUATION = 0, 1


class Interrupted(ArgosyError):
    """A signal asked the run to stop while answers were generated; they are given up."""


class SamplersLost(ArgosyError):
    """What samples elsewhere cannot go on. The run saves what it has learned, and ends with this."""


class SamplingRequest(NamedTuple):
    """How prompts are answered.

    most: tokens of an answer, its end included. seed: of this call alone; answers to equal prompts differ by their place. ignore_eos:
    no token ends an answer.
    """

    most: int
    sampling: Sampling
    seed: tuple[int, ...]
    ignore_eos: bool = False


@dataclass
class SampledCompletion:
    """The tokens of an answer, the log-probability of each in the distribution that it was drawn from, and whether the answer came to
    its own end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


@runtime_checkable
class RemoteSampler(Protocol):
    """A language model whose engines are in other processes. lost: processes that ended while they sampled for it. weights_s: seconds
    in which its weights got there."""

    tokenizer: Any
    lost: int
    weights_s: float

    def drawn(
        self, prompts: Sequence[Sequence[int]], request: SamplingRequest, interrupted: Callable[[], bool]
    ) -> list[SampledCompletion]:
        """An answer to each prompt. Raises Interrupted, SamplersLost."""
        ...

    def sleep(self) -> None: ...


@dataclass
class Episode:
    """How an answer of several turns went.

    turns: messages of the assistant and of the environment, in order; those of a text have the environment's role.
    reward: the sum of the environment's rewards; None: it gave none.
    rewards: the environment's reward of each turn that it replied to.
    starts: the place of the first token of each of the model's turns in the answer.
    said: the place of each of the model's turns in `turns`.
    turn_count: turns of the model.
    failure: why the answer has no reward (`raised`, `timed out`, `died`, `not rendered`), with its message.
    why: the reason of its end (`done`, `environment`, `turns`, `room`, `failed`).
    observed: tokens of the environment.
    cut: observations that were too long.
    counts: the numbers that the environment counted.
    begun: the tokens of the prompt, if the environment spoke first.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    rewards: list[float | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    turn_count: int = 0
    failure: tuple[str, str] | None = None
    why: str = "room"
    observed: int = 0
    cut: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    begun: list[int] | None = None


@dataclass
class Trajectory:
    """An answer to a prompt.

    tokens: after the prompt, the end-of-sequence token included. live: whether the policy made each of them; an environment made the
    others. logprobs: of each in the distribution that it was drawn from; NaN for the environment's. ended: by its own end, not by the
    limit. text: of the tokens, without the end. played: with an environment, how it went. thinking: the prompt ends inside a thought.
    """

    prompt: Prompt
    tokens: list[int]
    live: list[bool]
    logprobs: list[float]
    ended: bool
    text: str
    played: Episode | None = None
    thinking: bool = False

    @property
    def finish_reason(self) -> str:
        """`stop`, or `length` where the limit of tokens cut it."""
        return "stop" if self.ended else "length"

    @property
    def said(self) -> Any:
        """The answer as rewards read it: a text, or messages where the prompt is messages, as in TRL. With an environment all turns."""
        if self.played is not None and not isinstance(self.prompt.content, str):
            return [{name: item for name, item in one.items() if name != "reward"} for one in self.played.turns]
        return self.text if isinstance(self.prompt.content, str) else [{"role": "assistant", "content": self.text}]


def sample_trajectories(
    lm: LM | RemoteSampler,
    prompts: Sequence[Prompt],
    most: int,
    sampling: Sampling,
    seed: tuple[int, ...],
    interrupted: Callable[[], bool] = lambda: False,
    ignore_eos: bool = False,
) -> list[Trajectory]:
    """One answer to each of these prompts, in their order; a prompt may occur several times.

    Args:
        most: tokens of an answer, its end included.
        seed: of this call alone. Answers to equal prompts differ by their place.
        interrupted: asked between steps.
        ignore_eos: no token ends an answer.

    Raises:
        Interrupted: it said yes.
    """
    how, asked = SamplingRequest(most, sampling, seed, ignore_eos), [one.tokens for one in prompts]
    found = sample_completions(lm, asked, how, interrupted) if isinstance(lm, LM) else lm.drawn(asked, how, interrupted)
    answers: list[Trajectory] = []
    for prompt, one in zip(prompts, found, strict=True):
        shown = one.tokens[:-1] if one.ended else one.tokens
        text = text_with_thoughts(lm.tokenizer, shown) if lm.tokenizer is not None else " ".join(map(str, shown))
        thinking = opens_thought(lm.tokenizer, prompt.tokens)
        answers.append(Trajectory(prompt, one.tokens, [True] * len(one.tokens), one.logprobs, one.ended, text, thinking=thinking))
    return answers


def sample_completions(
    lm: LM, prompts: Sequence[Sequence[int]], sampling: SamplingRequest, interrupted: Callable[[], bool] = lambda: False, first: int = 0
) -> list[SampledCompletion]:
    """One answer to each of these prompts, in token ids, by the engine of this process.

    Args:
        first: the place of the first prompt among those that are answered by the same seed.

    Raises:
        Interrupted: it said yes, between two steps.
    """
    ends = frozenset[int]() if sampling.ignore_eos else frozenset(lm.stops())
    asked = [Request(list(one), sampling.most, sampling.sampling, ends, sampling.seed, row) for row, one in enumerate(prompts, first)]
    engine = lm.engine([len(one) + sampling.most for one in prompts])
    answers = [SampledCompletion() for _ in prompts]
    rows: dict[int, int] = {}
    try:
        for row, request in enumerate(asked):
            rows[engine.add(request)] = row
        while engine.busy:
            if interrupted():
                raise Interrupted("stopped while answers were generated")
            for event in engine.step():
                answer = answers[rows[event.id]]
                if event.token is None:
                    raise RuntimeError(f"an answer of a rollout ended by {event.finish_reason}")
                answer.tokens.append(event.token)
                answer.logprobs.append(event.drawn)
                answer.ended = event.finish_reason == "stop"
    except BaseException:
        # Nobody knows what the engine holds after half a step.
        lm.forget()
        raise
    return answers
