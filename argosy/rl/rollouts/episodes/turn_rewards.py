"""The rewards of the turns of episodes as arrays, and the metrics of episodes."""

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

    rewards: [B K], the environment's reward of each turn; 0 where it gave none.
    is_rewarded: [B K], whether the environment gave a reward for the turn.
    turn_count: [B], the number of turns of each completion.
    number: [B L], the index of the turn of each token; meaningless at tokens of the environment.
    """

    rewards: np.ndarray
    is_rewarded: np.ndarray
    turn_count: np.ndarray
    number: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums the values of tokens over each turn. Returns [B K].

        Args:
            values: [B L], the value of each token; it must be 0 at tokens of the environment.
        """
        out = np.zeros(self.rewards.shape, np.float32)
        np.add.at(out, (np.arange(len(out))[:, None], self.number), values)
        return out

    def of_tokens(self, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Repeats the values of turns [B K] at each token of the turn. Returns [B L].

        Args:
            live: [B L], 1 for tokens that the policy sampled.
        """
        return np.where(live > 0, np.take_along_axis(values, self.number, 1), 0.0)

    def at_ends(self, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Places the values of turns [B K] at the last token of the turn; other tokens get 0. Returns [B L].

        Args:
            live: [B L], 1 for tokens that the policy sampled.
        """
        is_live = live > 0
        place = np.where(is_live, np.arange(live.shape[1]), -1)
        last = np.full(self.rewards.shape, -1)
        np.maximum.at(last, (np.arange(len(last))[:, None], self.number), place)
        at = is_live & (place == np.take_along_axis(last, self.number, 1))
        return np.where(at, np.take_along_axis(values, self.number, 1), 0.0)


def episode_turns(answers: Sequence[Trajectory], most: int, longest: int) -> EpisodeTurns:
    """Makes arrays of the turns of completions.

    Args:
        most: K, the largest number of turns.
        longest: L, the largest number of tokens.
    """
    rewards, is_rewarded = np.zeros((len(answers), most), np.float32), np.zeros((len(answers), most), bool)
    turn_count, number = np.zeros(len(answers), np.int32), np.zeros((len(answers), longest), np.int32)
    for row, answer in enumerate(answers):
        assert answer.played is not None, "turns of an answer without an environment"
        for turn, reward in enumerate(answer.played.rewards):
            rewards[row, turn], is_rewarded[row, turn] = reward or 0.0, reward is not None
        turn_count[row] = len(answer.played.starts)
        for start in answer.played.starts[1:]:
            number[row, start:] += 1
    return EpisodeTurns(rewards, is_rewarded, turn_count, number)


def environment_rewards(answers: Sequence[Trajectory]) -> np.ndarray:
    """Returns the environment's reward of each whole completion as a column [B 1]; NaN where it gave none."""
    rewards = [None if answer.played is None else answer.played.reward for answer in answers]
    return np.array([[np.nan if value is None else value] for value in rewards], np.float32)


def failed_episodes(answers: Sequence[Trajectory]) -> np.ndarray:
    """Returns, for each completion [B], whether its environment failed. Such completions have no reward, whatever reward functions
    return."""
    return np.array([answer.played is not None and answer.played.failure is not None for answer in answers], bool)


def episode_failures(answers: Sequence[Trajectory]) -> Iterator[tuple[str, str]]:
    """Returns the kind and the message of each failure of an episode."""
    return (answer.played.failure for answer in answers if answer.played is not None and answer.played.failure is not None)


def episode_numbers(answers: Sequence[Trajectory]) -> dict[str, float]:
    """Computes the metrics of episodes: means over episodes, and totals of failures and of the numbers that environments counted."""
    played = [answer.played for answer in answers if answer.played is not None]
    if not played:
        return {}
    out = {
        "turns": float(np.mean([episode.turn_count for episode in played])),
        "turns/max": float(max(episode.turn_count for episode in played)),
        "observations/tokens": float(np.mean([episode.observed for episode in played])),
        "observations/cut": float(sum(episode.cut for episode in played)),
    }
    for name, place in (("first", 0), ("last", -1)):
        rewards = [episode.rewards[place] for episode in played if episode.rewards]
        if scored := [reward for reward in rewards if reward is not None]:
            out[f"turns/reward_{name}"] = float(np.mean(scored))
    out |= {f"environment/{why}": float(np.mean([episode.why == why for episode in played])) for why in LIMITS[:2]}
    for kind, _ in episode_failures(answers):
        key = f"environment/{kind.replace(' ', '_')}"
        out[key] = out.get(key, 0.0) + 1
    for episode in played:
        for name, value in episode.counts.items():
            out[name] = out.get(name, 0.0) + value
    return out
