"""The interfaces between rollouts and the rest of a run: the judge that scores completions, access to the trainer, and the records of
completions."""

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

    values: [B k], the k rewards of each completion; NaN where a reward is missing.
    failed: [B], whether a reward of the completion failed. Such completions are left out of the loss.
    counts: the number of failed completions, by reward and kind of failure.
    """

    @property
    def values(self) -> np.ndarray: ...
    @property
    def failed(self) -> np.ndarray: ...
    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]: ...


@runtime_checkable
class Judge(Protocol):
    """Scores completions by k rewards, and reports failures. `rl.rewards.functions.Rewards` is a judge."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Sequence[float]: ...

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Scores: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trainer:
    """Access of a rollout to the training run.

    weights: (training state) -> the weights for the engine. They are the state's own arrays, copies on other devices, or a message for
        other processes.
    engine: (weights) -> the language model with these weights.
    """

    weights: Callable[[Any], Any]
    engine: Callable[[Any], LM | RemoteSampler]


@dataclass(frozen=True)
class PolicyTrainer(Trainer):
    """Access of a policy's rollouts to the training run. Only functions that the policy needs are called.

    old: (training state, rows of a part) -> the log-probabilities of completion tokens under the trained model, [S L].
    reference: (training state, rows of a part) -> the log-probabilities of the same tokens under the reference model, [S L].
    values: (training state, rows of a part) -> the critic's values before the tokens, [S L], and after the last token, [S].
    """

    old: Callable[[Any, Batch], np.ndarray]
    reference: Callable[[Any, Batch], np.ndarray]
    values: Callable[[Any, Batch], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class StudentTrainer(Trainer):
    """Access of a student's rollouts to the training run.

    teacher: () -> the teacher as a language model that samples.
    compare: (training state, parts) -> the `loss` and the metrics of the objective, as means over the parts.
    """

    teacher: Callable[[], LM]
    compare: Callable[[Any, Sequence[Batch]], dict[str, float]]


@dataclass(frozen=True)
class TrajectoryRecord:
    """One completion as it is displayed and stored.

    rollout: the number of the rollout, from 1.
    prompt: the prompt, a text or a list of messages.
    completion: the text of the completion.
    rewards: the rewards by name; None where one is missing.
    advantage: the advantage of the first token that the policy sampled. If turns are credited one by one, the mean over turns.
    tokens: the number of tokens that the policy sampled.
    ended: whether the completion ended by itself, before the limit of tokens.
    turns: the messages of the policy and of the environment; None without an environment.
    """

    rollout: int
    prompt: Any
    completion: str
    rewards: dict[str, float | None]
    advantage: float
    tokens: int
    ended: bool
    turns: list[dict[str, Any]] | None = None


class NoRewards:
    """The judge of a run in which only the environment gives rewards."""

    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> "NoScores":
        return NoScores(np.zeros((len(completions), 0), np.float32), np.zeros(len(completions), bool))

    def close(self) -> None: ...


@dataclass(frozen=True)
class NoScores:
    """The scores of `NoRewards`. Their values have the shape [n 0] for n completions."""

    values: np.ndarray
    failed: np.ndarray
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def cut_warning(cut: float, number: int) -> str:
    """Makes the warning that more than half of the completions of a rollout were cut.

    Args:
        cut: the share of completions that were cut.
        number: the number of the rollout.
    """
    return f"{cut:.0%} of the completions of rollout {number} were cut at rollout.tokens before they ended (answers/cut)"


class PromptsExhausted(ArgosyError):
    """The epochs of the prompts are over: too few are left for a rollout."""


@dataclass
class ScoredTrajectories:
    """The completions of a rollout, group by group.

    answers: the completions.
    rewards: [B k], the rewards of each completion.
    greedy: [g k], the rewards of the greedy completion of each prompt; None if the policy does not compare with these.
    """

    answers: list[Trajectory] = field(default_factory=list)
    rewards: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    greedy: np.ndarray | None = None

    def plus(self, answers: list[Trajectory], rewards: np.ndarray, greedy: np.ndarray | None) -> "ScoredTrajectories":
        if not self.answers:
            return ScoredTrajectories(answers, rewards, greedy)
        both = None if greedy is None or self.greedy is None else np.concatenate([self.greedy, greedy])
        return ScoredTrajectories([*self.answers, *answers], np.concatenate([self.rewards, rewards]), both)

    def groups(self, indices: Sequence[int], size: int) -> "ScoredTrajectories":
        """Selects groups.

        Args:
            indices: the indices of the groups to keep.
            size: the number of completions in a group.
        """
        rows = [g * size + i for g in indices for i in range(size)]
        greedy = None if self.greedy is None else self.greedy[list(indices)]
        return ScoredTrajectories([self.answers[row] for row in rows], self.rewards[rows], greedy)
