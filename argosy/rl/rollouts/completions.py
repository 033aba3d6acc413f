"""Completions of prompts, sampled by the engine with the current weights.

Every rollout has its own random streams: the run's seed, the number of the rollout and the index of the completion decide them, and
nothing else does. The end-of-sequence token is part of a completion and is learned, because without it the model never learns to stop.
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
    """A signal asked the run to stop while completions were generated; they are given up."""


class SamplersLost(ArgosyError):
    """The sampling processes cannot go on. The run saves what it has learned, and ends with this error."""


class SamplingRequest(NamedTuple):
    """How prompts are completed.

    most: limit of a completion in tokens, the end-of-sequence token included.
    sampling: temperature and truncation.
    seed: random seed of this call alone; completions of equal prompts differ by their index.
    ignore_eos: whether completions go on after an end-of-sequence token.
    """

    most: int
    sampling: Sampling
    seed: tuple[int, ...]
    ignore_eos: bool = False


@dataclass
class SampledCompletion:
    """A completion in tokens.

    tokens: its token ids.
    logprobs: the log-probability of each token in the distribution that it was drawn from.
    ended: whether it ended by itself, before the limit.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


@runtime_checkable
class RemoteSampler(Protocol):
    """A language model whose engines run in other processes.

    lost: number of processes that ended while they sampled.
    weights_s: seconds that it took to send the weights.
    """

    tokenizer: Any
    lost: int
    weights_s: float

    def drawn(
        self, prompts: Sequence[Sequence[int]], request: SamplingRequest, interrupted: Callable[[], bool]
    ) -> list[SampledCompletion]:
        """A completion of each prompt.

        Raises:
            Interrupted: a signal asked the run to stop.
            SamplersLost: the processes cannot go on.
        """
        ...

    def sleep(self) -> None: ...


@dataclass
class Episode:
    """The course of a completion of several turns.

    turns: messages of the assistant and of the environment, in order. Turns of a text prompt have the environment's role.
    reward: the sum of the environment's rewards; None if it gave none.
    rewards: the environment's reward of each turn that it replied to.
    starts: index of the first token of each model turn in the completion.
    said: index of each model turn in `turns`.
    turn_count: number of model turns.
    failure: why the completion has no reward (`raised`, `timed out`, `died`, `not rendered`), with its message.
    why: why the episode ended (`done`, `environment`, `turns`, `room`, `failed`).
    observed: number of tokens that the environment wrote.
    cut: number of observations that were cut to the limit.
    counts: numbers that the environment counted, by name.
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
    """A prompt and its completion.

    tokens: tokens after the prompt, the end-of-sequence token included.
    live: whether the policy sampled the token; the environment wrote the others.
    logprobs: log-probability of each token in the distribution that it was drawn from; NaN for the environment's tokens.
    ended: whether the completion ended by itself, before the limit.
    text: the text of the tokens, without the end-of-sequence token.
    played: with an environment, the course of its turns.
    thinking: whether the prompt ends inside a thought.
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
        """`stop`, or `length` if the token limit cut the completion."""
        return "stop" if self.ended else "length"

    @property
    def said(self) -> Any:
        """The completion as reward functions receive it: a text, or messages if the prompt is messages, as in TRL. With an environment,
        all turns.
        """
        if self.played is not None and not isinstance(self.prompt.content, str):
            return [{name: item for name, item in turn.items() if name != "reward"} for turn in self.played.turns]
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
    """One completion of each prompt, in their order; a prompt may occur several times.

    Args:
        most: limit of a completion in tokens, the end-of-sequence token included.
        seed: random seed of this call alone; completions of equal prompts differ by their index.
        interrupted: asked between steps whether to stop.
        ignore_eos: whether completions go on after an end-of-sequence token.

    Raises:
        Interrupted: `interrupted` returned True.
    """
    request, token_ids = SamplingRequest(most, sampling, seed, ignore_eos), [prompt.tokens for prompt in prompts]
    if isinstance(lm, LM):
        completions = sample_completions(lm, token_ids, request, interrupted)
    else:
        completions = lm.drawn(token_ids, request, interrupted)
    answers: list[Trajectory] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        visible = completion.tokens[:-1] if completion.ended else completion.tokens
        text = text_with_thoughts(lm.tokenizer, visible) if lm.tokenizer is not None else " ".join(map(str, visible))
        thinking = opens_thought(lm.tokenizer, prompt.tokens)
        tokens, logprobs = completion.tokens, completion.logprobs
        answers.append(Trajectory(prompt, tokens, [True] * len(tokens), logprobs, completion.ended, text, thinking=thinking))
    return answers


def sample_completions(
    lm: LM, prompts: Sequence[Sequence[int]], sampling: SamplingRequest, interrupted: Callable[[], bool] = lambda: False, first: int = 0
) -> list[SampledCompletion]:
    """One completion of each prompt, in token ids, by the engine of this process.

    Args:
        first: index of the first prompt among all prompts that are sampled with this seed.

    Raises:
        Interrupted: `interrupted` returned True between two steps.
    """
    ends = frozenset[int]() if sampling.ignore_eos else frozenset(lm.stops())
    requests = [
        Request(list(prompt), sampling.most, sampling.sampling, ends, sampling.seed, row)
        for row, prompt in enumerate(prompts, first)
    ]
    engine = lm.engine([len(prompt) + sampling.most for prompt in prompts])
    answers = [SampledCompletion() for _ in prompts]
    rows: dict[int, int] = {}
    try:
        for row, request in enumerate(requests):
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
