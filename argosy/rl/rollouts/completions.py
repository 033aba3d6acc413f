"""Completions of prompts, sampled by the engine with the current weights.

Every completion has its own random stream. Only the run's seed, the number of the rollout and the index of the completion decide it.
The end-of-sequence token is part of a completion and is learned, because without it the model never learns to stop.
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
    """A signal asked the run to stop while completions were sampled. These completions are given up."""


class SamplersLost(ArgosyError):
    """The sampling processes cannot go on. The run saves a checkpoint, and ends with this error."""


class SamplingRequest(NamedTuple):
    """How prompts are completed.

    most: the largest length of a completion in tokens, the end-of-sequence token included.
    sampling: the temperature, and top-k, top-p and min-p.
    seed: the random seed of this call alone. Completions of equal prompts differ by their index.
    ignore_eos: whether completions go on after an end-of-sequence token.
    """

    most: int
    sampling: Sampling
    seed: tuple[int, ...]
    ignore_eos: bool = False


@dataclass
class SampledCompletion:
    """A completion in tokens.

    tokens: the token ids of the completion.
    logprobs: the log-probability of each token in the distribution that it was drawn from.
    ended: whether the completion ended by itself, before the limit of tokens.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


@runtime_checkable
class RemoteSampler(Protocol):
    """A language model whose engines run in other processes.

    tokenizer: the tokenizer of the model.
    lost: the number of processes that ended while they sampled.
    weights_s: the time that it took to send the weights, in seconds.
    """

    tokenizer: Any
    lost: int
    weights_s: float

    def drawn(
        self, prompts: Sequence[Sequence[int]], request: SamplingRequest, interrupted: Callable[[], bool]
    ) -> list[SampledCompletion]:
        """Samples a completion of each prompt.

        Args:
            prompts: the token ids of each prompt.
            request: how prompts are completed.
            interrupted: asked from time to time whether to stop.

        Raises:
            Interrupted: a signal asked the run to stop.
            SamplersLost: the processes cannot go on.
        """
        ...

    def sleep(self) -> None: ...


@dataclass
class Episode:
    """The course of an episode: a completion of several turns.

    turns: the messages of the assistant and of the environment, in order. The role of the environment's messages is that of
        `TurnCodec.role` where the prompt is a text.
    reward: the sum of the environment's rewards; None if it gave no reward.
    rewards: the environment's reward of each turn that it replied to.
    starts: the index of the first token of each model turn within the completion.
    said: the index of each model turn within `turns`.
    turn_count: the number of model turns.
    failure: the kind of failure because of which the completion has no reward (`raised`, `timed out`, `died`, `not rendered`), and its
        message.
    why: the reason why the episode ended (`done`, `environment`, `turns`, `room`, `failed`).
    observed: the number of tokens that the environment wrote.
    cut: the number of observations that were cut to the limit.
    counts: numbers that the environment counted, by metric.
    begun: the tokens of the prompt with the first observation, if the environment made one before the first turn.
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

    prompt: the prompt.
    tokens: the token ids after the prompt, the end-of-sequence token included.
    live: for each token, whether the policy sampled it. The environment wrote the others.
    logprobs: the log-probability of each token in the distribution that it was drawn from; NaN for tokens of the environment.
    ended: whether the completion ended by itself, before the limit of tokens.
    text: the text of the tokens, without the end-of-sequence token.
    played: the course of the episode; None without an environment.
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
        """The completion as reward functions receive it: a text, or a list of messages if the prompt is one, as in TRL. Where there is
        an environment, the messages are those of all turns.
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
    """Samples one completion of each prompt, in the order of the prompts. A prompt may occur several times.

    Args:
        lm: the language model of this process, or one whose engines run in other processes.
        most: the largest length of a completion in tokens, the end-of-sequence token included.
        seed: the random seed of this call alone. Completions of equal prompts differ by their index.
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
    """Samples one completion of each prompt, in token ids, by the engine of this process.

    Args:
        prompts: the token ids of each prompt.
        sampling: how prompts are completed.
        interrupted: asked between steps whether to stop.
        first: the index of the first prompt among all prompts that are sampled with this seed, also by other processes.

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
