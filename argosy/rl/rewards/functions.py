"""Rewards of completions, from functions that run in separate processes and from reward models.

    settings = [RewardSettings(of="rewards.py:short"), RewardSettings(of="maths", weight=2)]
    with open_rewards(settings, workers=4, columns=["answer"]) as rewards:
        scored = rewards(prompts, completions, {"answer": answers})     # scored.values [n k], NaN where there is no reward

The parameters of a function name the columns that it receives: `prompts`, `completions`, columns of the data, and columns that a run
adds (`GIVEN`). Each column is a list with one item per completion. The function returns a list with one number per completion, or None
for a completion that it does not score. It may be `async`. It is called once for a whole batch, so that it can compare completions or
ask another service for all of them at once. A function with the attribute `per_completion = True` is called for each completion alone,
on all processes. Then a completion that crashes it or takes too long harms no other completion.

If a function returns None for a completion, the other rewards decide. If a function fails, its completions are left out of the loss,
because counting a time-out of the sandbox as 0 would punish them.

The random generators (`random`, NumPy's global generator) are seeded from the arguments of each call, so the result depends neither on
the process that runs it nor on the number of processes. State that a module keeps between calls does depend on them.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput
from argosy.rl.rewards.pool import Answer, RewardCall, RewardPool
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.rewards.sources import GIVEN, check_functions, lacking, reward_names, source_of

Say = Callable[[str], None]
LARGEST = float(np.finfo(np.float32).max)
# Where a reward is missing although its function did not say so.
FAILURES = ("raised", "timed out", "died", "not finite")


@dataclass(frozen=True)
class RewardScores:
    """The rewards of one batch.

    values: [n k] float32, NaN where there is no reward.
    names: the names of the k rewards.
    failed: [n], whether a reward of the completion failed. A returned None is no failure.
    counts: the number of completions whose reward failed, by reward and kind of failure (`FAILURES`).
    messages: the first error message of this batch, by reward and kind of failure.
    """

    values: np.ndarray
    names: tuple[str, ...]
    failed: np.ndarray
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    messages: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def none_at_all(self) -> bool:
        """Whether every reward of every completion is missing, so that nothing can be learned from the batch."""
        return not bool(np.isfinite(self.values).any())

    def check(self) -> None:
        """Checks that some completion has a reward.

        Raises:
            ArgosyError: no completion has one.
        """
        if self.none_at_all:
            count = len(self.values)
            first = next((text for kinds in self.messages.values() for text in kinds.values()), None)
            hint = f"the first failure: {first.strip().splitlines()[0]}" if first else "every function returned None"
            raise ArgosyError(f"none of {plural(count, 'completion')} has a reward", hint=hint)


class Rewards:
    """Reward functions and reward models that are ready to use, as `open_rewards` makes them. Call the object with a batch. Call
    `close` afterwards, or use `with`."""

    def __init__(
        self, rewards: Sequence[RewardSettings], pool: RewardPool | None, places: Sequence[int], models: Mapping[int, Any], say: Say
    ):
        """Args:
            rewards: the settings of all k rewards.
            pool: the processes that run the reward functions; None if there are only models.
            places: for each function of the pool, its index among all rewards.
            models: the reward models, by their index among all rewards.
            say: called with the first failure of each kind of each reward.
        """
        self.rewards, self.names = tuple(rewards), tuple(reward_names(rewards))
        self._pool, self._places, self._models, self._say = pool, list(places), dict(models), say
        self._said: set[tuple[str, str]] = set()

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each reward, in the order of the columns of `RewardScores.values`."""
        return tuple(reward.weight for reward in self.rewards)

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
        """Scores a batch.

        Args:
            prompts: the prompt of each completion, a text or a list of messages. A prompt with several completions is repeated.
            completions: texts or lists of messages. Functions receive prompts and completions unchanged.
            columns: further columns of the data, and the available columns of `GIVEN`, each with one item for each completion.

        Raises:
            BadInput: lists of different lengths, a missing column that a function needs, or a function that does not return one number
                or None for each completion.
            ArgosyError: a function that was loaded before cannot be loaded again, after its process had to be ended.
        """
        self._check(prompts, completions, columns)
        batch = _Batch(list(prompts), list(completions), {name: list(items) for name, items in columns.items()})
        scores = _ScoreTable(self.names, len(completions), self._first)
        if self._pool is not None and len(completions):
            self._call(self._pool, batch, scores)
        for place, model in self._models.items():
            values, failed = model(batch.prompts, batch.completions)
            scores.values[:, place] = values
            for row, kind, text in failed:
                scores.fail(place, slice(row, row + 1), kind, text)
        return scores.scored()

    def _call(self, pool: RewardPool, batch: "_Batch", scores: "_ScoreTable") -> None:
        calls: list[RewardCall] = []
        rows: list[slice] = []
        for number, (place, requirements) in enumerate(zip(self._places, pool.about)):
            for part in batch.parts(requirements["per_completion"]):
                calls.append(batch.call(number, requirements, part, self.rewards[place].timeout))
                rows.append(part)

        def done(at: int, answer: Answer) -> None:
            place, part = self._places[calls[at].function], rows[at]
            if "wrong" in answer:
                raise BadInput(f"the reward `{self.rewards[place].of}` {answer['wrong']}", hint="return one number or None for each")
            if "values" in answer:
                scores.put(place, part, answer["values"])
            else:
                scores.fail(place, part, *_failure(answer, calls[at]))

        pool.run(calls, done)

    def _check(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        for name, items in {"prompts": prompts, **columns}.items():
            if isinstance(items, str) or len(items) != len(completions):
                count = "a text" if isinstance(items, str) else plural(len(items), "item")
                many = plural(len(completions), "completion")
                raise BadInput(f"`{name}` has {count} for {many}", hint="give one item for each completion")
        for name in ("prompts", "completions"):
            if name in columns:
                raise BadInput(f"a column `{name}` would hide the {name} from reward functions", hint="rename the column")
        for place, requirements in zip(self._places, self._pool.about if self._pool else []):
            if wrong := lacking(self.rewards[place].of, requirements, list(columns)):
                raise wrong

    def _first(self, name: str, kind: str, message: str) -> None:
        """Reports a failure, once for each kind of failure of each reward."""
        if (name, kind) not in self._said:
            self._said.add((name, kind))
            hint = "\nhint: a function returns None for a completion that it has no reward for" if kind == "raised" else ""
            self._say(f"reward {name} {kind}, its completions are left out:\n{message.rstrip()}{hint}")


@dataclass(frozen=True)
class _Batch:
    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]

    def parts(self, per_completion: bool) -> list[slice]:
        count = len(self.completions)
        return [slice(i, i + 1) for i in range(count)] if per_completion else [slice(0, count)]

    def call(self, number: int, requirements: Mapping[str, Any], part: slice, timeout: float) -> RewardCall:
        everything = {**self.columns, "prompts": self.prompts, "completions": self.completions}
        every = [name for name in everything if name not in GIVEN] if requirements["every"] else []
        names = [name for name in everything if name in requirements["takes"] or name in every]
        return RewardCall(number, part.stop - part.start, lambda: {name: everything[name][part] for name in names}, timeout)


class _ScoreTable:
    """Collects the rewards of a batch as they arrive."""

    def __init__(self, names: Sequence[str], count: int, first: Callable[[str, str, str], None]):
        self.names, self.first = tuple(names), first
        self.values = np.full((count, len(names)), np.nan, np.float32)
        self.failed = np.zeros(count, bool)
        self.counts: dict[str, dict[str, int]] = {}
        self.messages: dict[str, dict[str, str]] = {}

    def put(self, place: int, part: slice, values: Sequence[float | None]) -> None:
        for i, value in enumerate(values, part.start):
            if value is None:
                continue
            # A number beyond float32 is infinite in it.
            if math.isfinite(value) and abs(value) <= LARGEST:
                self.values[i, place] = value
            else:
                self.fail(place, slice(i, i + 1), "not finite", f"it returned {value} for completion {i}")

    def fail(self, place: int, part: slice, kind: str, message: str) -> None:
        name, count = self.names[place], part.stop - part.start
        self.failed[part] = True
        kinds = self.counts.setdefault(name, {})
        kinds[kind] = kinds.get(kind, 0) + count
        self.messages.setdefault(name, {}).setdefault(kind, message)
        self.first(name, kind, message)

    def scored(self) -> RewardScores:
        return RewardScores(self.values, self.names, self.failed, self.counts, self.messages)


def _failure(answer: Answer, call: RewardCall) -> tuple[str, str]:
    if "timed_out" in answer:
        return "timed out", f"a call takes more than {call.timeout:g} s; its process was ended"
    if "died" in answer:
        return "died", f"its process ended in a call: {answer['died']}"
    return "raised", answer["raised"]


def open_rewards(
    rewards: Sequence[RewardSettings],
    workers: int,
    *,
    columns: Sequence[str] | None = None,
    load: Callable[[Path], Any] | None = None,
    say: Say | None = None,
) -> Rewards:
    """Loads reward functions in `workers` processes and reward models in this process, and checks all of them.

    Args:
        rewards: the settings of the rewards.
        workers: the number of processes for functions. Each process loads all functions.
        columns: the names of the data's further columns, to check the parameters of functions now. None: each call checks them.
        load: loads the language model of a folder. The default is `argosy.infer.load.load_lm`.
        say: called with the first failure of each kind of each reward. By default failures are written to stderr.

    Raises:
        BadInput, SettingsError: there are no rewards; a file, function, built-in or folder does not exist; a file cannot be imported
            (the error names its line); a function needs a missing column; a model's head does not give one score.
        ArgosyError: a process cannot be started, or ends while it loads functions.
    """
    if not rewards:
        raise BadInput("no reward", hint="give one: `reward=FILE.py:FUNCTION`")
    reward_names(rewards)
    if hidden := [name for name in GIVEN if name in (columns or ())]:
        raise BadInput(f"a column `{hidden[0]}` would hide what a run tells reward functions by that name", hint="rename the column")
    sources = [source_of(reward) for reward in rewards]
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    functions = [(place, source) for place, source in enumerate(sources) if not isinstance(source, Path)]
    pool = None
    if functions:
        if workers < 1:
            raise BadInput(f"{workers} processes for reward functions", hint="give 1 or more")
        pool = RewardPool([source for _, source in functions], workers)
    try:
        if pool is not None:
            check_functions([source for _, source in functions], pool.about, None if columns is None else [*columns, *GIVEN])
        models = {place: _model(source, rewards[place], load) for place, source in enumerate(sources) if isinstance(source, Path)}
    except BaseException:
        if pool is not None:
            pool.close()
        raise
    return Rewards(rewards, pool, [place for place, _ in functions], models, say)


def _model(folder: Path, reward: RewardSettings, load: Callable[[Path], Any] | None) -> Any:
    from argosy.rl.rewards.models import ModelReward

    return ModelReward.opened(folder, reward, load)
