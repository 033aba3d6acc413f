"""Runs episodes: the policy writes a turn, its environment replies, and so on until the episode ends.

Each model turn is a separate request to the engine. The prompt of the request is the episode so far, most of which is in the prefix
cache. So an episode that waits for its environment holds no slot of the engine, and others go on.

Samples must not depend on how long environments take. Every turn has its own random stream, but the engine's rounding depends on the
other sequences of the step. So the wait is counted in engine steps: an episode continues exactly `wait` steps after its turn ended, and
the engine waits if the environment has not replied by then. With a `wait` of None an episode continues as soon as there is a reply.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.rows.prompts import Prompt
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.environments import pool as environment_pool
from argosy.rl.environments.pool import EnvironmentPool
from argosy.rl.rollouts.completions import Episode, Interrupted, Trajectory
from argosy.rl.rollouts.episodes.turns import EpisodeConversation, HistoryRewritten, TurnCodec

# How often a signal is looked for while the engine waits for environments.
LOOK_S = 0.1
FAILURES = {"raised": "raised", "timed_out": "timed out", "died": "died"}


@dataclass(frozen=True)
class EpisodeSetup:
    """The environments of a rollout and the limits of its episodes.

    environments: the processes of environments.
    turns: converts turns to tokens and back.
    most: the largest number of model turns in an episode.
    processes: the number of environments that run at a time. Other episodes wait.
    wait: the number of engine steps between two turns of an episode. None: the next turn begins as soon as the environment replies.
    tokens: the largest length of a turn in tokens; None: the room that is left in the completion.
    weight: the weight of the environment's reward.
    gives: whether the environment gives rewards.
    identity: the settings of the environment that decide trajectories, as a text.
    """

    environments: EnvironmentPool
    turns: TurnCodec
    most: int
    processes: int
    wait: int | None
    tokens: int | None = None
    weight: float = 1.0
    gives: bool = True
    identity: str = ""

    def close(self) -> None:
        self.environments.close()


@dataclass(frozen=True)
class EpisodeLimits:
    """How the completions of episodes are sampled.

    sampling: the temperature, and top-k, top-p and min-p.
    most: the largest length of a completion in tokens, with the environment's tokens.
    longest: the largest length of a prompt and its completion together, in tokens.
    ignore_eos: whether a turn goes on after an end-of-sequence token.
    """

    sampling: Sampling
    most: int
    longest: int
    ignore_eos: bool = False


@dataclass(eq=False)
class _Play:
    """An episode that is running.

    due: the engine step at which the reply of the environment is read; -1 if the episode does not wait for a reply.
    """

    row: int
    answer: Trajectory
    played: Episode
    environment: environment_pool.EnvironmentProcess
    due: int
    seed: int
    talk: EpisodeConversation | None = None
    # Of the turn that is being sampled.
    stream: Any = None
    text: str = ""


class EpisodeRunner:
    """Runs one episode for each prompt, in the order of the prompts. A prompt may occur several times. Call `run` once.

    Args:
        seed: the random seed of these episodes alone. Environments of neighboring equal prompts get the same seed.
        interrupted: asked between engine steps whether to stop.
    """

    def __init__(
        self,
        lm: LM,
        prompts: Sequence[Prompt],
        limits: EpisodeLimits,
        seed: tuple[int, ...],
        table: EpisodeSetup,
        interrupted: Callable[[], bool],
    ):
        self.lm, self.prompts, self.limits, self.seed, self.table, self.interrupted = lm, prompts, limits, seed, table, interrupted
        ends = frozenset[int]() if limits.ignore_eos else frozenset(lm.stops())
        self.ends = {token: table.turns.tokenizer.decode([token], skip_special=False) for token in sorted(ends)}
        self.seeds = environment_seeds(prompts, seed)
        self.answers = [Trajectory(prompt, [], [], [], False, "", Episode()) for prompt in prompts]
        self.left = deque(range(len(prompts)))
        self.open: dict[int, _Play] = {}
        self.asked: dict[int, _Play] = {}
        self.now = 0
        self.waited_s = 0.0

    def run(self) -> list[Trajectory]:
        """Runs all episodes, and returns the trajectory of each prompt.

        Raises:
            Interrupted: a signal asked the run to stop.
            BadInput: the environment returned a value that is not allowed.
        """
        if not self.prompts:
            return []
        engine = self.lm.engine([self.limits.longest] * len(self.prompts))
        # What earlier calls have left would decide rounding.
        engine.reset_prefix_cache()
        try:
            while self.left or self.open:
                if self.interrupted():
                    raise Interrupted("stopped while answers were generated")
                self.begin()
                for play in self.ready(engine.busy):
                    play.due = -1
                    self.replied(engine, play)
                if engine.busy:
                    self.now += 1
                    for event in engine.step():
                        self.spoken(engine, event)
        except BaseException:
            # Nobody knows what the engine holds after half a step.
            self.lm.forget()
            raise
        finally:
            self.table.environments.end_all()
        return self.answers

    # ---------------------------------------------------------------- environments

    def begin(self) -> None:
        """Begins further episodes as long as environment processes are free."""
        while self.left and len(self.open) < self.table.processes:
            row = self.left.popleft()
            prompt, answer = self.prompts[row], self.answers[row]
            assert answer.played is not None
            play = _Play(row, answer, answer.played, self.table.environments.open(), self.now + (self.table.wait or 0), self.seeds[row])
            self.open[row] = play
            play.environment.ask(self.table.environments.first_message(prompt.content, play.seed, prompt.columns))

    def ready(self, busy: bool) -> list[_Play]:
        """Returns the episodes that continue now. Waits for the replies that are due. If the engine is idle (`busy` is False), waits
        for at least one reply.
        """
        waiting = [play for play in self.open.values() if play.due >= 0]
        if not waiting:
            return []
        if self.table.wait is None:
            self.look(waiting, None if busy else 1)
            return [play for play in waiting if play.environment.reply is not None]
        if not busy:
            self.now = max(self.now, min(play.due for play in waiting))
        due = sorted((play for play in waiting if play.due <= self.now), key=lambda play: (play.due, play.row))
        self.look(due, len(due))
        return due

    def look(self, plays: Sequence[_Play], count: int | None) -> None:
        """Reads the replies of the environments of these episodes.

        Args:
            count: the number of replies to wait for; None: does not wait.
        """
        start = time.monotonic()
        environments = [play.environment for play in plays]
        self.table.environments.look(environments)
        while count is not None and sum(environment.reply is not None for environment in environments) < count:
            if self.interrupted():
                raise Interrupted("stopped while environments worked")
            self.table.environments.look(environments, LOOK_S)
        self.waited_s += time.monotonic() - start

    def replied(self, engine: Engine, play: _Play) -> None:
        """Continues an episode whose environment has replied, or ends it."""
        reply, played = play.environment.reply or {}, play.played
        if "wrong" in reply:
            raise BadInput(f"the environment `{self.table.environments.source['of']}`: {reply['wrong']}")
        for kind, name in FAILURES.items():
            if kind in reply:
                message = f"a step takes more than {self.table.environments.timeout:g} s" if kind == "timed_out" else str(reply[kind])
                hint = "\nhint: an answer whose environment raises has no reward; Turn(done=True) ends one" if kind == "raised" else ""
                return self.failed(play, name, message.rstrip() + hint)
        if play.talk is not None:
            played.rewards.append(reply["reward"])
            if reply["reward"] is not None:
                played.reward = (played.reward or 0.0) + reply["reward"]
                played.turns[-1]["reward"] = reply["reward"]
            for name, value in reply["counts"].items():
                played.counts[name] = played.counts.get(name, 0.0) + value
            if reply["done"] or reply["cut"] or played.turn_count == self.table.most:
                play.answer.ended = reply["done"] and not reply["cut"]
                return self.end(play, "done" if play.answer.ended else "environment" if reply["cut"] else "turns")
        try:
            going = self.observe(play, reply["observation"])
        except HistoryRewritten as error:
            return self.failed(play, "not rendered", error.what)
        if not going:
            return self.end(play, "room")
        self.speak(engine, play)

    def observe(self, play: _Play, observation: Any) -> bool:
        """Appends an observation to an episode. Returns False if no room is left for another turn."""
        turns, answer, played = self.table.turns, play.answer, play.played
        if play.talk is None:
            play.talk, observed = turns.begun(answer.prompt, observation, self.limits.longest - self.limits.most)
            answer.prompt = play.talk.prompt
            played.begun = list(answer.prompt.tokens) if observed.said else None
        else:
            last = answer.tokens[-1] if answer.tokens[-1] in self.ends else None
            observed = turns.follow(play.talk, observation, last, self.ends)
        if len(answer.tokens) + len(observed.tokens) >= self.limits.most:
            return False
        answer.tokens += observed.tokens
        answer.live += [False] * len(observed.tokens)
        answer.logprobs += [float("nan")] * len(observed.tokens)
        played.observed += len(observed.tokens)
        played.turns += [dict(message) for message in observed.said]
        played.cut += observed.cut
        return True

    def failed(self, play: _Play, kind: str, message: str) -> None:
        play.played.failure = kind, message
        self.end(play, "failed")

    def end(self, play: _Play, why: str) -> None:
        """Ends an episode, and frees its environment process.

        Args:
            why: the reason, as in `Episode.why`.
        """
        play.played.why = why
        play.due = -1
        if why == "room" and not play.played.rewards:
            # The sum over no steps: a policy that never ends its first turn must not go without a reward.
            play.played.reward = 0.0
        self.table.environments.end(play.environment)
        del self.open[play.row]
        answer, turns = play.answer, self.table.turns
        visible = answer.tokens[:-1] if answer.tokens and answer.tokens[-1] in self.ends else answer.tokens
        whole = isinstance(answer.prompt.content, str)
        answer.text = "".join(turn["content"] for turn in play.played.turns) if whole else turns.tokenizer.decode(visible)

    # ---------------------------------------------------------------- the model

    def speak(self, engine: Engine, play: _Play) -> None:
        """Requests the next turn of an episode from the engine."""
        answer, seed = play.answer, (*self.seed, play.played.turn_count)
        play.text, play.stream = "", self.table.turns.tokenizer.stream()
        play.played.starts.append(len(answer.tokens))
        if isinstance(answer.prompt.content, str):
            play.stream.begun()
        tokens, most = [*answer.prompt.tokens, *answer.tokens], self.limits.most - len(answer.tokens)
        most = most if self.table.tokens is None else min(most, self.table.tokens)
        self.asked[engine.add(Request(tokens, most, self.limits.sampling, frozenset(self.ends), seed, play.row))] = play

    def spoken(self, engine: Engine, event: Event) -> None:
        """Adds the token of an engine event to its completion. At the end of a turn, sends the turn to the environment."""
        if (play := self.asked.get(event.id)) is None:
            # Its turn was ended by a text.
            return
        if event.token is None:
            raise RuntimeError(f"an answer of a rollout ended by {event.finish_reason}")
        answer = play.answer
        answer.tokens.append(event.token)
        answer.live.append(True)
        answer.logprobs.append(event.drawn)
        play.text += play.stream.push(event.token)
        stopped = self.table.turns.stopped(play.text)
        if event.finish_reason is None and not stopped:
            return
        engine.end(event.id)
        del self.asked[event.id]
        assert play.talk is not None
        play.text += play.stream.end()
        message = self.table.turns.said(play.talk, answer.tokens[play.played.starts[-1] :], play.text, self.ends)
        play.played.said.append(len(play.played.turns))
        play.played.turns.append(dict(play.talk.messages[-1]))
        play.played.turn_count += 1
        if event.finish_reason == "length" and not stopped and len(answer.tokens) == self.limits.most:
            return self.end(play, "room")
        play.environment.ask({"step": message})
        play.due = self.now + (self.table.wait or 0)


def environment_seeds(prompts: Sequence[Prompt], seed: tuple[int, ...]) -> list[int]:
    """Returns a seed of 32 bits for the environment of each prompt. Neighboring equal prompts have the same seed, since their rewards
    are compared."""
    seeds: list[int] = []
    place = -1
    for row, prompt in enumerate(prompts):
        place += row == 0 or prompt is not prompts[row - 1]
        words = [word % 2**32 for number in (*seed, place) for word in (number, number >> 32)]
        seeds.append(int(np.random.SeedSequence(words).generate_state(1)[0]))
    return seeds
