"""Samples rollouts: completes prompts and scores the completions. `rl.rollouts.signals.rewards` makes advantages and updates of them.

A rollout depends only on the weights, the index of its first prompt, its number and the run's seed. So another thread, or other devices
than those of training, may sample it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import ArgosyError
from argosy.data.rows.prompts import Prompt
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.advantages.credit import RolloutRewards, useful_groups
from argosy.rl.advantages.totals import overlong
from argosy.rl.policy.settings import Policy
from argosy.rl.rollouts.batches import Signal
from argosy.rl.rollouts.completions import EVALUATION, ROLLOUT, RemoteSampler, Trajectory, sample_trajectories
from argosy.rl.rollouts.episodes.trajectories import EpisodeLimits, EpisodeRunner, EpisodeSetup
from argosy.rl.rollouts.episodes.turn_rewards import (
    ENVIRONMENT,
    environment_rewards,
    episode_failures,
    episode_turns,
    failed_episodes,
)
from argosy.rl.rollouts.fitting import LOOKED_AT, length_warning, next_that_fit
from argosy.rl.rollouts.packing import per_token
from argosy.rl.rollouts.records import Judge, ScoredTrajectories
from argosy.rl.rollouts.sampled import SampledRollout

OVERLONG = "overlong"
# The largest reward times its weight: advantages and critics square sums of rewards, and a square above 3e38 is infinite in float32.
LARGEST = 1e15


class RewardSampler:
    """Samples rollouts and their rewards.

    signal: holds the prompts, and the index of the next prompt, which sampling advances.
    judge: scores completions.
    table: the environments and limits of episodes; None without an environment.
    """

    def __init__(self, signal: Signal, policy: Policy, judge: Judge, table: EpisodeSetup | None):
        self.signal, self.policy, self.judge, self.table = signal, policy, judge, table
        self.prompts, self.rollout, self.seed = signal.prompts, signal.rollout, signal.seed
        self.longest_prompt, self.groups = signal.longest_prompt, signal.batch // signal.rollout.completions
        self.complain = signal.complain

    def __call__(self, lm: LM | RemoteSampler, seen: int) -> SampledRollout:
        """Samples the next rollout with a language model (`Signal.sample`).

        Args:
            seen: the number of rollouts that the model's weights have learned from.

        Raises:
            ArgosyError: no completion has a reward, or no prompt fits.
        """
        before = self.signal.place
        rollout = SampledRollout(self.signal.number, seen)
        if isinstance(lm, LM):
            lm.reset_prefix_cache()
        try:
            rollout.trajectories = self.rounds(lm, rollout)
            if not isinstance(lm, LM):
                rollout.clock.seconds["weights_s"] = lm.weights_s
                rollout.failed["rollout_lost"] = float(lm.lost)
            self.check_rewarded(rollout)
        except BaseException:
            self.signal.place = before
            raise
        rollout.place, self.signal.number = self.signal.place, rollout.number + 1
        return rollout

    def rounds(self, lm: LM | RemoteSampler, rollout: SampledRollout) -> ScoredTrajectories:
        trajectories = ScoredTrajectories()
        while True:
            missing = self.groups - len(trajectories.answers) // self.rollout.completions
            trajectories = trajectories.plus(*self.round(lm, missing, rollout))
            useful = self.useful(trajectories)
            rollout.rounds += 1
            if rollout.rounds > self.rollout.resample or len(useful) == self.groups:
                break
            # A useless group makes room, except in the last round.
            trajectories = trajectories.groups(useful, self.rollout.completions)
        return trajectories.groups(useful, self.rollout.completions) if self.rollout.resample and useful else trajectories

    def round(
        self, lm: LM | RemoteSampler, count: int, rollout: SampledRollout
    ) -> tuple[list[Trajectory], np.ndarray, np.ndarray | None]:
        """Samples and scores completions of the next `count` prompts.

        Returns:
            The completions; their rewards [B k]; and the rewards of one greedy completion per prompt [g k], or None if the policy does
            not compare with these.
        """
        each, policy = self.rollout, self.policy
        prompts = self.next_prompts(count)
        with rollout.clock("generate_s"):
            several = [prompt for prompt in prompts for _ in range(each.completions)]
            answers = self.answered(lm, several, policy.temperature, rollout)
            plain = self.answered(lm, prompts, 0.0, rollout) if policy.needs_greedy else None
        return answers, self.judged(answers, rollout), None if plain is None else self.judged(plain, rollout)

    def answered(self, lm: LM | RemoteSampler, prompts: list[Prompt], temperature: float, rollout: SampledRollout) -> list[Trajectory]:
        settings = self.rollout
        filters: dict[str, Any] = {"top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p} if temperature else {}
        seed = (self.seed, ROLLOUT, rollout.number, rollout.rounds)
        sampling = Sampling(temperature=temperature, **filters)
        return self.sampled(lm, prompts, sampling, seed, rollout, settings.ignore_eos)

    def sampled(
        self,
        lm: LM | RemoteSampler,
        prompts: list[Prompt],
        sampling: Sampling,
        seed: tuple[int, ...],
        rollout: SampledRollout,
        ignore_eos: bool = False,
    ) -> list[Trajectory]:
        """Samples one completion of each prompt. With an environment, completions have several turns."""
        most = self.rollout.tokens
        if self.table is None:
            return sample_trajectories(lm, prompts, most, sampling, seed, self.signal.interrupted, ignore_eos)
        assert isinstance(lm, LM), "several turns with an engine in another process"
        limits = EpisodeLimits(sampling, most, self.longest_prompt + most, ignore_eos)
        playing = EpisodeRunner(lm, prompts, limits, seed, self.table, self.signal.interrupted)
        answers = playing.run()
        rollout.clock.seconds["environment_s"] = rollout.clock.seconds.get("environment_s", 0.0) + playing.waited_s
        played = [answer.played for answer in answers if answer.played is not None]
        first = [episode for episode in played if episode.turn_count <= 1 and episode.why == "room"]
        cut = [episode for episode in first if episode.turns and episode.turns[-1]["role"] == "assistant"]
        if answers and len(cut) == len(answers):
            self.complain(
                "no answer of a rollout came to the end of its first turn, so no step of the environment was called: environment.stop "
                "is a text that ends a turn, environment.tokens the most tokens of one, rollout.tokens those of all turns",
                "no turn",
            )
        for kind, message in episode_failures(answers):
            self.complain(f"environment {kind}, its answers have no reward:\n{message.rstrip()}", f"environment {kind}")
        return answers

    def greedy(self, lm: LM | RemoteSampler, prompts: Sequence[Prompt]) -> tuple[list[Trajectory], np.ndarray]:
        """Samples greedy completions for evaluation, of those prompts that leave room for one. Returns the completions and their
        rewards.
        """
        fitting, sampling = self.fitting(prompts), Sampling(temperature=0.0)
        if not fitting:
            return [], np.zeros((0, len(self.names)), np.float32)
        answers = self.sampled(lm, fitting, sampling, (self.seed, EVALUATION), SampledRollout())
        return answers, self.judged(answers, SampledRollout())

    # ---------------------------------------------------------------- prompts

    def next_prompts(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts that leave room for a completion. Longer prompts are skipped and reported."""
        most = LOOKED_AT * len(self.prompts)
        prompts, self.signal.place = next_that_fit(self.prompts, self.signal.place, count, self.fitting, self.longest_prompt, most)
        return prompts

    def fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Selects the prompts that leave room for a completion. The first longer prompt is reported."""
        for prompt in prompts:
            if len(prompt.tokens) > self.longest_prompt:
                self.complain(length_warning(prompt, self.longest_prompt), "long")
        return [prompt for prompt in prompts if len(prompt.tokens) <= self.longest_prompt]

    # ---------------------------------------------------------------- rewards

    @property
    def scored(self) -> list[str]:
        """The names of the rewards, without the penalty of overlong completions. The environment's reward comes first."""
        environment_names = [ENVIRONMENT] if self.table is not None and self.table.gives else []
        return [*environment_names, *self.judge.names]

    @property
    def names(self) -> list[str]:
        return [*self.scored, *([OVERLONG] if self.rollout.overlong else [])]

    @property
    def weights(self) -> list[float]:
        environment_weights = [self.table.weight] if self.table is not None and self.table.gives else []
        return [*environment_weights, *self.judge.weights, *([1.0] if self.rollout.overlong else [])]

    def judged(self, answers: list[Trajectory], rollout: SampledRollout) -> np.ndarray:
        """Scores completions. Returns their rewards [B k]. The penalty of overlong completions is the last column, if there is one."""
        columns = {name: [answer.prompt.columns[name] for answer in answers] for name in self.prompts.names}
        columns |= {"finish_reasons": [answer.finish_reason for answer in answers]}
        columns |= {"thinking_prompts": [answer.thinking for answer in answers]}
        with rollout.clock("reward_s"):
            scores = self.judge([answer.prompt.content for answer in answers], [answer.said for answer in answers], columns)
        for name, kinds in scores.counts.items():
            for kind, count in kinds.items():
                key = f"rewards/{name}/{kind.replace(' ', '_')}"
                rollout.failed[key] = rollout.failed.get(key, 0.0) + count
        values = scores.values
        if self.scored != list(self.judge.names):
            values = np.concatenate([environment_rewards(answers), values], 1)
        broken = failed_episodes(answers) | scores.failed | self.too_large(values)
        rollout.failed["rewards/failed"] = rollout.failed.get("rewards/failed", 0.0) + float(broken.sum())
        # A punishment alone is no reward: the answer would count as one of 0.
        none = broken | ~np.isfinite(values).any(1)
        if self.rollout.overlong:
            lengths = np.array([len(answer.tokens) for answer in answers], np.float32)
            punished = np.asarray(overlong(jnp.asarray(lengths), self.rollout.tokens, self.rollout.overlong))
            values = np.concatenate([values, punished[:, None]], 1)
        return np.where(none[:, None], np.float32(np.nan), values)

    def too_large(self, values: np.ndarray) -> np.ndarray:
        """Returns, for each completion [B], whether it has a weighted reward whose square overflows float32."""
        weights = np.asarray([*self.weights][: values.shape[1]], np.float64)
        largest = np.abs(np.where(np.isfinite(values), values, 0.0) * weights).max(1, initial=0.0)
        if (largest > LARGEST).any():
            problem = f"a reward of {largest.max():.3g} is too large to compare in float32, which holds squares up to 1e38"
            self.complain(f"{problem}: answers beyond {LARGEST:g} are left out; lower the reward or its weight", "too large")
        return largest > LARGEST

    def useful(self, scored: ScoredTrajectories) -> list[int]:
        """Returns the indices of the groups whose advantages are not all zero."""
        return np.flatnonzero(useful_groups(self.policy, self.judgment(scored))).tolist()

    def judgment(self, scored: ScoredTrajectories) -> RolloutRewards:
        """Makes the inputs of advantages that the completions alone provide, without those that need a model."""
        live = per_token(scored.answers, self.rollout.tokens, "live")
        turns = None
        if self.table is not None and self.policy.credit.by != "answer":
            turns = episode_turns(scored.answers, self.table.most, self.rollout.tokens)
            if not turns.is_rewarded.any():
                problem = f"objective.credit.by={self.policy.credit.by}: the environment gave no turn of a rollout a reward"
                self.complain(f"{problem}, so that only those of whole answers count", "no turn rewarded")
        return RolloutRewards(self.by_group(scored.rewards), self.weights, live, scored.greedy, turns=turns)

    def by_group(self, rewards: np.ndarray) -> np.ndarray:
        return rewards.reshape(-1, self.rollout.completions, rewards.shape[1])

    def check_rewarded(self, rollout: SampledRollout) -> None:
        """Checks that some completion has a reward.

        Raises:
            ArgosyError: no completion has one.
        """
        if not np.isfinite(rollout.trajectories.rewards[:, : len(self.scored)]).any():
            hint = "what they said is above; nothing was learned from this rollout, and what was saved before is good"
            raise ArgosyError(f"no answer of rollout {rollout.number + 1} has a reward ({', '.join(self.scored)})", hint=hint)
