"""The training signal of reinforcement learning: rewards are compared with each other, and give every token an advantage.

    completions -> rewards -> advantages (`advantages.credit`) -> packed micro-batches
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput, UserError, mistakes_of, raise_mistakes
from argosy.core.progress import Say
from argosy.data.order import select_fields
from argosy.data.rows.prompts import Prompts
from argosy.rl.advantages.credit import RolloutAdvantages, rollout_advantages
from argosy.rl.advantages.totals import reward_metrics, total
from argosy.rl.policy.kl import in_reward
from argosy.rl.policy.metrics import Metrics, mean_where, metric_values
from argosy.rl.policy.objective import shared_of
from argosy.rl.policy.settings import Policy
from argosy.rl.rollouts.batches import Engine, RolloutBatches, Signal
from argosy.rl.rollouts.completions import Trajectory
from argosy.rl.rollouts.episodes.trajectories import EpisodeSetup
from argosy.rl.rollouts.episodes.turn_rewards import episode_numbers
from argosy.rl.rollouts.fitting import check_sizes
from argosy.rl.rollouts.packing import (
    PackedPart,
    PartShape,
    RolloutBatch,
    density,
    pack_trajectories,
    per_token,
    shared_share,
)
from argosy.rl.rollouts.records import Judge, TrajectoryRecord, cut_warning
from argosy.rl.rollouts.sampled import SampledRollout
from argosy.rl.rollouts.sampler import RewardSampler
from argosy.rl.rollouts.settings import Rollout


class RewardSignal(Signal):
    """The training signal that rewards of the policy's own completions give.

    policy: the settings of the objective, which decide how rewards become advantages.
    judge: scores completions.
    table: the environments and limits of episodes; None without an environment.

    Raises:
        BadInput: settings do not fit each other.
    """

    def __init__(
        self,
        prompts: Prompts,
        held_out: Prompts | None,
        policy: Policy,
        rollout: Rollout,
        batch: int,
        shape: PartShape,
        judge: Judge,
        seed: int,
        say: Say = lambda _: None,
        table: EpisodeSetup | None = None,
    ):
        super().__init__(prompts, held_out, rollout, batch, shape, seed, say)
        self.policy, self.judge, self.table = policy, judge, table
        sizes = batch, rollout, shape, prompts.most, batch // rollout.completions
        checks = lambda: check_sizes(*sizes), lambda: check_comparison(policy, rollout), lambda: check_credit(policy, table)
        raise_mistakes(mistakes_of(*checks))
        self.sampler = RewardSampler(self, policy, judge, table)
        self.identity = {"rewards": list(judge.names), "weights": list(judge.weights)}
        self.identity |= {} if table is None else {"environment": table.identity}

    def sample(self, engine: Engine, seen: int) -> SampledRollout:
        lm = engine()
        rollout = self.sampler(lm, seen)
        if not self.rollout.ahead:
            # The update needs the memory of its cache.
            lm.sleep()
        return rollout

    def close(self) -> None:
        self.judge.close()
        if self.table is not None:
            self.table.close()

    # ---------------------------------------------------------------- updates

    def updates(self, state: Any, rollout: SampledRollout) -> list[RolloutBatch]:
        """Makes the updates of a rollout. Its groups are divided into `minibatches` updates, which are repeated for each epoch."""
        settings, trajectories, answers = self.rollout, rollout.trajectories, rollout.trajectories.answers
        shares = np.array_split(np.arange(len(answers)).reshape(-1, settings.completions), settings.minibatches)
        parts = [pack_trajectories(answers, share.reshape(-1).tolist(), self.shape) for share in shares if share.size]
        judgment = self.sampler.judgment(trajectories)
        live = judgment.live
        with rollout.clock("logps_s"):
            outputs = self.known(state, [part for minibatch in parts for part in minibatch], len(answers))
        ended = np.array([answer.ended for answer in answers])
        metrics: Metrics = {}
        if self.policy.kl and self.policy.kl_in == "reward":
            arrays = (jnp.asarray(a) for a in (np.zeros_like(live), outputs["old"], outputs["reference"], live))
            less, metrics = in_reward(*arrays, coefficient=self.policy.kl)
            judgment = judgment._replace(penalty=-np.asarray(less))
        if "values" in outputs:
            judgment = judgment._replace(values=outputs["values"], after=np.where(ended, 0.0, outputs["after"]))
        by = rollout_advantages(self.policy, judgment)
        counted = by.counted & (ended | settings.keep_cut)
        columns = {"live": live * counted[:, None], "advantages": by.values * counted[:, None]}
        columns |= {"sampler": per_token(answers, settings.tokens, "logprobs")}
        columns |= {"old": outputs["old"] if settings.updates > 1 else np.full(live.shape, np.nan, np.float32)}
        columns |= {name: outputs[name] for name in ("reference", "values") if name in outputs}
        columns |= {} if by.returns is None else {"returns": by.returns}
        fields = {**self.policy.reads(), **shared_of(self.shape)}
        filled = [[select_fields(part.filled(columns), fields) for part in minibatch] for minibatch in parts]
        self.keep(self.trajectory_records(rollout, by))
        numbers = self.numbers(rollout, by._replace(metrics=by.metrics | metrics), counted)
        if numbers.get("groups/useless") == 1:
            problem = f"all answers to each prompt of rollout {rollout.number + 1} have the same reward, so the rewards teach nothing"
            self.complain(f"{problem}: groups/useless tells how many groups are so", "equal")
        self.say_cut(numbers["answers/cut"], rollout.number + 1, bool(counted.any()))
        numbers |= {"part_density": density([part for minibatch in filled for part in minibatch])}
        if self.shape.shared:
            numbers |= {"tokens_spared": self.spared([part for minibatch in parts for part in minibatch], answers)}
        return [RolloutBatch(minibatch, numbers) for _ in range(settings.epochs) for minibatch in filled]

    def say_cut(self, cut: float, number: int, learned: bool) -> None:
        """Reports, once each, that most completions were cut and that no completion of a rollout is learned from.

        Args:
            cut: the share of completions that were cut.
            number: the number of the rollout.
            learned: whether some completion is learned from.
        """
        if not learned:
            why = "all were cut, and rollout.keep_cut=false leaves those out" if cut == 1 else "each was cut or has no reward"
            problem = f"no completion of rollout {number} is learned from: {why}"
            self.complain(f"{problem}; raise rollout.tokens, or set rollout.keep_cut=true", "none counted")
        elif cut > 0.5:
            self.complain(f"{cut_warning(cut, number)}; raise rollout.tokens", "cut")

    def spared(self, parts: Sequence[PackedPart], answers: Sequence[Trajectory]) -> float:
        """Returns the share of tokens that shared prompts save. Reports once if the settings ask for sharing and it saves nothing."""
        share = shared_share(parts, answers)
        several = any(len(answer.prompt.tokens) > 1 for answer in answers) and self.rollout.completions > 1
        if self.rollout.share_prompts and several and not share:
            problem = f"no two answers to a prompt fit into a row of {plural(self.shape.sequence, 'token')}, so that none share it"
            self.complain(f"{problem}: raise data.sequence, or leave out rollout.share_prompts", "apart")
        return share

    def known(self, state: Any, parts: Sequence[PackedPart], count: int) -> dict[str, np.ndarray]:
        """Computes what the run's models predict for the completions before the first update, as far as the settings need it.

        Args:
            state: the training state.
            parts: the packed completions.
            count: B, the number of completions.

        Returns:
            `old`, `reference` and `values` [B L], and `after` [B] with a critic (`rl.policy.objective`).
        """
        in_reward = self.policy.kl and self.policy.kl_in == "reward"
        computations: dict[str, Any] = {"old": self.trainer.old} if self.rollout.updates > 1 or in_reward else {}
        computations |= {"reference": self.trainer.reference} if self.policy.kl else {}
        out = {name: np.zeros((count, self.rollout.tokens), np.float32) for name in computations}
        if self.policy.critic is not None:
            out |= {"values": np.zeros((count, self.rollout.tokens), np.float32), "after": np.zeros(count, np.float32)}
        for part in parts:
            for name, ask in computations.items():
                part.spread(ask(state, part.rows), out[name])
            if self.policy.critic is not None:
                values, after = self.trainer.values(state, part.rows)
                part.spread(values, out["values"])
                part.spread(after, out["after"])
        return out

    def numbers(self, rollout: SampledRollout, by: RolloutAdvantages, counted: np.ndarray) -> dict[str, float]:
        """Computes the metrics of a rollout.

        Args:
            by: the advantages of the rollout.
            counted: [B], whether each completion takes part in the loss.
        """
        answers, n, names = rollout.trajectories.answers, self.rollout.completions, self.sampler.names
        lengths = np.array([sum(answer.live) for answer in answers], np.float32)
        distinct = [len({tuple(answer.tokens) for answer in answers[i : i + n]}) / n for i in range(0, len(answers), n)]
        metrics: Metrics = by.metrics | dict(reward_metrics(jnp.asarray(self.sampler.by_group(rollout.trajectories.rewards)), names))
        return metric_values(metrics) | {
            "rollout": float(rollout.number + 1),
            "rollout_age": float(rollout.number - rollout.seen),
            "rollout_rounds": float(rollout.rounds),
            "groups": float(len(answers) // n),
            "answers/tokens": float(lengths.mean()),
            "answers/tokens_max": float(lengths.max()),
            "answers/cut": float(np.mean([not answer.ended for answer in answers])),
            "answers/distinct": float(np.mean(distinct)),
            "answers/left_out": float(np.mean(~counted)),
            **episode_numbers(answers),
            **rollout.clock.seconds,
            **rollout.failed,
        }

    def trajectory_records(self, rollout: SampledRollout, by: RolloutAdvantages) -> list[TrajectoryRecord]:
        """Makes the records of a rollout's completions, as they are displayed and stored."""
        answers, names, number = rollout.trajectories.answers, self.sampler.names, rollout.number + 1
        # That of the first token of the policy: an environment may have spoken before it.
        first = by.values[np.arange(len(answers)), [answer.live.index(True) if any(answer.live) else 0 for answer in answers]].tolist()
        if by.turns is not None:
            first = [float(its[: max(len(answer.played.said), 1)].mean()) for answer, its in zip(answers, by.turns) if answer.played]
        turns = [recorded_turns(answer, None if by.turns is None else by.turns[row].tolist()) for row, answer in enumerate(answers)]
        return [
            TrajectoryRecord(
                number, answer.prompt.content, answer.text, by_name(names, rewards), advantage, sum(answer.live), answer.ended, its
            )
            for answer, rewards, advantage, its in zip(answers, rollout.trajectories.rewards, first, turns, strict=True)
        ]

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, state: Any, engine: Engine, most: int) -> dict[str, float]:
        lm = engine()
        answers, rewards = self.sampler.greedy(lm, self.held_out(0, most))
        if not answers:
            return {}
        lm.sleep()
        values, names = rewards[:, None], self.sampler.names
        summed = total(jnp.asarray(values), self.sampler.weights)
        metrics: Metrics = {"reward": mean_where(summed, jnp.isfinite(summed).astype(summed.dtype))}
        metrics |= reward_metrics(jnp.asarray(values), names)
        return {f"eval_{name}": value for name, value in metric_values(metrics).items()} | {
            "eval_answers/cut": float(np.mean([not answer.ended for answer in answers])),
            "eval_prompts": float(len(answers)),
            **{f"eval_{name}": value for name, value in episode_numbers(answers).items()},
        }


def reward_batches(*args: Any, **kwargs: Any) -> RolloutBatches:
    """Makes the batches of a run that learns from rewards. The arguments are those of `RewardSignal`."""
    return RolloutBatches(RewardSignal(*args, **kwargs))


def by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """Converts the rewards of a completion to a JSON object by name; a missing reward is null."""
    return {name: float(value) if np.isfinite(value) else None for name, value in zip(names, rewards, strict=True)}


def recorded_turns(answer: Trajectory, advantages: Sequence[float] | None) -> list[dict[str, Any]] | None:
    """Returns the turns of a completion as they are stored; None without an environment. If turns are credited one by one, each model
    turn includes its advantage.
    """
    if answer.played is None or advantages is None:
        return None if answer.played is None else answer.played.turns
    turns = list(answer.played.turns)
    for place, advantage in zip(answer.played.said, advantages):
        turns[place] = turns[place] | {"advantage": advantage}
    return turns


def check_credit(policy: Policy, table: EpisodeSetup | None) -> None:
    """Checks that turns have rewards if the policy credits turns.

    Raises:
        BadInput: there is no environment, or it gives no rewards.
    """
    by = policy.credit.by
    if by == "answer":
        return
    hint = "an environment of your own rewards turns: its `step` returns Turn(observation, reward); or objective.credit.by=answer"
    if table is None:
        raise BadInput(f"objective.credit.by={by} credits turns, and an answer has one: environment=none", hint=hint)
    if not table.gives:
        name = table.environments.source["of"]
        raise BadInput(f"objective.credit.by={by} needs rewards of turns, and the environment `{name}` gives none", hint=hint)
    if table.most == 1:
        problem = f"objective.credit.by={by} credits turns, and environment.turns=1 lets an answer have one"
        raise BadInput(problem, hint="environment.turns=N, or objective.credit.by=answer")


def check_comparison(policy: Policy, rollout: Rollout) -> None:
    """Checks that the policy can learn from groups of this size.

    Raises:
        UserError: it cannot.
    """
    mistakes: list[UserError] = []
    n = rollout.completions
    if n < 2 and policy.compares_groups:
        problem = f"objective.advantages={policy.advantages} compares the answers to one prompt, and rollout.completions = {n}"
        hint = "sample at least 2 answers, or compare with the whole batch: objective.advantages=reinforce_pp"
        mistakes.append(BadInput(problem, hint=hint))
    if rollout.resample and not policy.compares_groups:
        problem = "rollout.resample: groups of equal rewards teach too, where they are compared with more"
        mistakes.append(BadInput(problem, hint="leave it out"))
    if policy.kl and policy.kl_in == "reward" and policy.normalize == "each":
        problem = "objective.kl_in=reward and objective.normalize=each: the penalty is no reward to compare"
        mistakes.append(BadInput(problem, hint="kl_in=loss"))
    if policy.loss == "reinforce" and rollout.updates > 1:
        problem = f"objective.loss=reinforce is for one update a rollout, and there are {rollout.updates}"
        hint = "objective.loss=ppo weighs answers of older weights; or rollout.epochs=1 rollout.minibatches=1"
        mistakes.append(BadInput(problem, hint=hint))
    raise_mistakes(mistakes)
