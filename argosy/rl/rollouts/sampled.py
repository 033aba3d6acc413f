"""A sampled rollout, and its form in a checkpoint: prompts are stored as indices, tokens as arrays, and the rest as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from argosy.data.rows.prompts import Prompts
from argosy.observe.goodput import Clock
from argosy.rl.rollouts.completions import Episode, Trajectory
from argosy.rl.rollouts.records import ScoredTrajectories

# Of a completion, a number for each token.
OF_TOKENS = {"tokens": np.int32, "live": np.bool_, "logprobs": np.float64}


@dataclass
class SampledRollout:
    """A rollout that was sampled and scored.

    number: the index among the rollouts of the run, from 0.
    seen: the number of rollouts that the policy had learned from when it sampled this one.
    trajectories: the completions and their rewards.
    rounds: the number of rounds of sampling (`rollout.resample`).
    place: the index of the next prompt after this rollout.
    failed: the numbers of missing rewards and of processes that ended, by metric.
    clock: the seconds spent, by metric.
    source: the origin of the completions: `own` (the policy), `teacher` or `data`.
    """

    number: int = 0
    seen: int = 0
    trajectories: ScoredTrajectories = field(default_factory=ScoredTrajectories)
    rounds: int = 0
    place: int = 0
    failed: dict[str, float] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    source: str = "own"


def stored_rollouts(rollouts: Sequence[SampledRollout]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Converts rollouts to arrays by name, and their other data to JSON. Prompts are stored as indices."""
    arrays: dict[str, np.ndarray] = {}
    records: list[dict[str, Any]] = []
    for i, rollout in enumerate(rollouts):
        answers, trajectories = rollout.trajectories.answers, rollout.trajectories
        lengths = [len(answer.tokens) for answer in answers]
        tokens = {name: np.concatenate([np.asarray(getattr(a, name), dtype) for a in answers]) for name, dtype in OF_TOKENS.items()}
        greedy = {} if trajectories.greedy is None else {"greedy": trajectories.greedy}
        columns = {"lengths": np.asarray(lengths, np.int32), "rewards": trajectories.rewards, **tokens, **greedy}
        arrays |= {f"{i}.{name}": a for name, a in columns.items()}
        rest = [{f.name: getattr(a, f.name) for f in fields(a) if f.name not in OF_TOKENS} for a in answers]
        texts = [
            record | {"prompt": record["prompt"].place, "played": record["played"] and asdict(record["played"])} for record in rest
        ]
        plain = {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name not in ("trajectories", "clock")}
        records.append(plain | {"seconds": rollout.clock.seconds, "answers": texts})
    return arrays, records


def restored_rollouts(arrays: Mapping[str, np.ndarray], records: Sequence[Mapping[str, Any]], prompts: Prompts) -> list[SampledRollout]:
    """The inverse of `stored_rollouts`."""
    out: list[SampledRollout] = []
    for i, record in enumerate(records):
        columns = {name.partition(".")[2]: np.asarray(a) for name, a in arrays.items() if name.startswith(f"{i}.")}
        ends = np.cumsum(columns["lengths"])[:-1]
        tokens = {name: [part.tolist() for part in np.split(columns[name], ends)] for name in OF_TOKENS}
        each = [{name: parts[j] for name, parts in tokens.items()} for j in range(len(record["answers"]))]
        answers = [restored_trajectory(rest, its, prompts) for rest, its in zip(record["answers"], each, strict=True)]
        trajectories = ScoredTrajectories(answers, columns["rewards"], columns.get("greedy"))
        plain = {name: value for name, value in record.items() if name not in ("answers", "seconds")}
        rollout = SampledRollout(**plain, trajectories=trajectories)
        rollout.clock.seconds = dict(record["seconds"])
        out.append(rollout)
    return out


def restored_trajectory(rest: Mapping[str, Any], tokens: Mapping[str, list[Any]], prompts: Prompts) -> Trajectory:
    """Makes one trajectory from its stored form.

    Args:
        rest: the JSON data of the trajectory.
        tokens: its arrays of one value per token, by name.
        prompts: the prompts of the run.
    """
    (prompt,) = prompts(rest["prompt"], 1)
    its = rest.get("played")
    played = its and Episode(**{**its, "failure": its["failure"] and tuple(its["failure"])})
    if played is not None and played.begun is not None:
        prompt = replace(prompt, tokens=played.begun)
    return Trajectory(**{**rest, **tokens, "prompt": prompt, "played": played})
