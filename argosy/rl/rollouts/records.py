"""What rollouts are made of: who scores answers, what a trainer lends, and the answers of a rollout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from argosy.core.errors import ArgosyError
from argosy.data.batch import Batch
from argosy.infer.lm import LM
from argosy.rl.rollouts.completions import RemoteSampler, Trajectory


@runtime_checkable
class Scores(Protocol):
    """The rewards of completions.

    values: [B k], NaN where missing.
    failed: [B], whether a reward of the completion failed, so that the completion is left out.
    counts: by reward and kind of failure, the completions.
    """

    @property
    def values(self) -> np.ndarray: ...
    @property
    def failed(self) -> np.ndarray: ...
    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]: ...


@runtime_checkable
class Judge(Protocol):
    """Scores answers by k rewards, and says what goes wrong (`rl.rewards.functions.Rewards`)."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Sequence[float]: ...

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Scores: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trainer:
    """What a training run lends to its rollouts.

    weights: (state) -> the state's weights for the engine: its own arrays, copies on other devices, or what other processes get.
    engine: (weights) -> the language model with these.
    """

    weights: Callable[[Any], Any]
    engine: Callable[[Any], LM | RemoteSampler]


@dataclass(frozen=True)
class PolicyTrainer(Trainer):
    """What the trainer of a policy lends besides. Only what the policy asks for is called.

    old, reference: (state, rows of a part) -> the log-probabilities of the tokens of its completions by the trained model and by the
        reference, [S L].
    values: those of the critic, [S L], and its value after the last token, [S].
    """

    old: Callable[[Any, Batch], np.ndarray]
    reference: Callable[[Any, Batch], np.ndarray]
    values: Callable[[Any, Batch], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class StudentTrainer(Trainer):
    """What the trainer of a student lends besides.

    teacher: () -> the teacher, to answer.
    compare: (state, parts) -> the objective's metrics and its `loss`, as means over the parts.
    """

    teacher: Callable[[], LM]
    compare: Callable[[Any, Sequence[Batch]], dict[str, float]]


@dataclass(frozen=True)
class TrajectoryRecord:
    """One answer, as it is shown and kept. Its reward is the weighted sum. advantage: of the first token; where turns are credited
    apart, the mean over turns. tokens: the policy's. turns: messages of the policy and of its environment, if it has one."""

    rollout: int
    prompt: Any
    completion: str
    rewards: dict[str, float | None]
    advantage: float
    tokens: int
    ended: bool
    turns: list[dict[str, Any]] | None = None


class NoRewards:
    """The judge of answers that their environment alone rewards."""

    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> "NoScores":
        return NoScores(np.zeros((len(completions), 0), np.float32), np.zeros(len(completions), bool))

    def close(self) -> None: ...


@dataclass(frozen=True)
class NoScores:
    """No rewards of n answers, [n 0]."""

    values: np.ndarray
    failed: np.ndarray
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def cut_warning(cut: float, number: int) -> str:
    """What is said where more than half of the completions were cut."""
    return f"{cut:.0%} of the completions of rollout {number} were cut at rollout.tokens before they ended (answers/cut)"


class PromptsExhausted(ArgosyError):
    """The epochs of the prompts are over: too few are left for a rollout."""


@dataclass
class ScoredTrajectories:
    """The answers of a rollout, group by group, with their rewards [B k]."""

    answers: list[Trajectory] = field(default_factory=list)
    rewards: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    greedy: np.ndarray | None = None

    def plus(self, answers: list[Trajectory], rewards: np.ndarray, greedy: np.ndarray | None) -> "ScoredTrajectories":
        if not self.answers:
            return ScoredTrajectories(answers, rewards, greedy)
        both = None if greedy is None or self.greedy is None else np.concatenate([self.greedy, greedy])
        return ScoredTrajectories([*self.answers, *answers], np.concatenate([self.rewards, rewards]), both)

    def groups(self, kept: Sequence[int], size: int) -> "ScoredTrajectories":
        """Some groups of it."""
        rows = [g * size + i for g in kept for i in range(size)]
        greedy = None if self.greedy is None else self.greedy[list(kept)]
        return ScoredTrajectories([self.answers[row] for row in rows], self.rewards[rows], greedy)
