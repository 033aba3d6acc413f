"""Environments: the other side of a policy's episodes of several turns.

    class Countdown:
        def __init__(self, start: int = 3):                    # settings: environment.args.start=5
            self.left = start

        def reset(self, prompt, seed):                         # may also name columns of the data; returns a text or None
            return f"{self.left} to go\\n"

        def step(self, said):                                  # `said` is the text or message of the model's turn
            self.left -= 1
            return Turn(f"{self.left} to go\\n", reward=float("down" in said), done=self.left == 0)

Each episode has its own object in its own process, so an environment that hangs or crashes harms no other episode. `seed` is the only
source of randomness; it also seeds `random` and NumPy's global generator. Completions of one prompt get the same seed, since their
rewards are compared. A repeated run gets the same seeds again.

If prompts are lists of messages, `step` receives the assistant's message. The message has `tool_calls` if the model called tools, and
`malformed` if the model seems to have tried. An observation is then a text, which becomes a message of the user (or of the role in the
attribute `role`), or a list of messages. JSON schemas in the attribute `tools` are shown to the model. This file imports the standard
library alone.

A class may have a classmethod `prepare`. It is called once with the arguments of the class, before any object is made, and all
processes share the data that it loads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Observation = str | Sequence[Mapping[str, Any]] | None


class Turn(NamedTuple):
    """The reply of an environment to a model turn.

    observation: the input of the model's next turn. The observation of the last turn is dropped.
    reward: the reward of this turn, or None. The rewards of all turns are summed, unless `objective.credit` credits turns. If no turn
        has a reward, the reward of the completion is missing.
    done: whether the episode is over.
    cut: whether a limit of the environment ended the episode, as Gymnasium's `truncated`.
    counts: a number for each metric, summed over all completions of a rollout.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    cut: bool = False
    counts: Mapping[str, float] = {}


class Environment(Protocol):
    """The interface of an environment. `reset` receives, of `prompt`, `seed` and the columns of the data, those that its parameters
    name."""

    def reset(self, **given: Any) -> Observation: ...

    def step(self, said: Any) -> Turn: ...
