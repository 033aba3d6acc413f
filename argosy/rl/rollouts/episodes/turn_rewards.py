"""Rewards of turns as arrays, and the metrics of completions of several turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.rl.rollouts.completions import Trajectory

ENVIRONMENT = "environment"
# Why an answer is over, beside its own end.
LIMITS = ("room", "turns", "environment")


@dataclass(frozen=True)
class EpisodeTurns:
    """The model turns of B completions of at most L tokens and K turns.

    rewards: [B K], the environment's reward; 0 where it gave none.
    is_rewarded: [B K], whether it gave one.
    turn_count: [B], number of turns.
    number: [B L], index of the turn of each token; meaningless at tokens of the environment.
    """

    rewards: np.ndarray
    is_rewarded: np.ndarray
    turn_count: np.ndarray
    number: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each turn, [B K].

        Args:
            values: [B L], 0 at tokens of the environment.
        """
        out = np.zeros(self.rewards.shape, np.float32)
        np.add.at(out, (np.arange(len(out))[:, None], self.number), values)
        return out

    def of_tokens(self, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Values of turns [B K], repeated at each token of the turn [B L]."""
        return np.where(live > 0, np.take_along_axis(values, self.number, 1), 0.0)

    def at_ends(self, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Values of turns [B K], placed at the last token of the turn [B L]."""
        own = live > 0
        place = np.where(own, np.arange(live.shape[1]), -1)
        last = np.full(self.rewards.shape, -1)
        np.maximum.at(last, (np.arange(len(last))[:, None], self.number), place)
        at = own & (place == np.take_along_axis(last, self.number, 1))
        return np.where(at, np.take_along_axis(values, self.number, 1), 0.0)


def episode_turns(answers: Sequence[Trajectory], most: int, longest: int) -> EpisodeTurns:
    """The turns of completions as arrays.

    Args:
        most: K, limit of turns.
        longest: L, limit of tokens.
    """
    rewards, given = np.zeros((len(answers), most), np.float32), np.zeros((len(answers), most), bool)
    made, number = np.zeros(len(answers), np.int32), np.zeros((len(answers), longest), np.int32)
    for row, one in enumerate(answers):
        assert one.played is not None, "turns of an answer without an environment"
        for turn, reward in enumerate(one.played.rewards):
            rewards[row, turn], given[row, turn] = reward or 0.0, reward is not None
        made[row] = len(one.played.starts)
        for start in one.played.starts[1:]:
            number[row, start:] += 1
    return EpisodeTurns(rewards, given, made, number)


def environment_rewards(answers: Sequence[Trajectory]) -> np.ndarray:
    """The environment's rewards as a column [B 1]; NaN where it gave none."""
    found = [None if one.played is None else one.played.reward for one in answers]
    return np.array([[np.nan if value is None else value] for value in found], np.float32)


def failed_episodes(answers: Sequence[Trajectory]) -> np.ndarray:
    """Whether the environment failed, for each completion [B]. Such completions have no reward, whatever reward functions return."""
    return np.array([one.played is not None and one.played.failure is not None for one in answers], bool)


def episode_failures(answers: Sequence[Trajectory]) -> Iterator[tuple[str, str]]:
    """The kind and the message of each failed episode."""
    return (one.played.failure for one in answers if one.played is not None and one.played.failure is not None)


def episode_numbers(answers: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of completions of several turns: means over completions, and totals of failures and of the environments' counts."""
    played = [one.played for one in answers if one.played is not None]
    if not played:
        return {}
    out = {
        "turns": float(np.mean([one.turn_count for one in played])),
        "turns/max": float(max(one.turn_count for one in played)),
        "observations/tokens": float(np.mean([one.observed for one in played])),
        "observations/cut": float(sum(one.cut for one in played)),
    }
    for name, place in (("first", 0), ("last", -1)):
        rewards = [one.rewards[place] for one in played if one.rewards]
        if given := [reward for reward in rewards if reward is not None]:
            out[f"turns/reward_{name}"] = float(np.mean(given))
    out |= {f"environment/{why}": float(np.mean([one.why == why for one in played])) for why in LIMITS[:2]}
    for kind, _ in episode_failures(answers):
        key = f"environment/{kind.replace(' ', '_')}"
        out[key] = out.get(key, 0.0) + 1
    for one in played:
        for name, value in one.counts.items():
            out[name] = out.get(name, 0.0) + value
    return out
