"""Environments: the other side of a policy's episodes of several turns.

    class Countdown:
        def __init__(self, start: int = 3):                    # settings: environment.args.start=5
            self.left = start

        def reset(self, prompt, seed):                         # what it names of prompt, seed and the columns; None, or a text
            return f"{self.left} to go\\n"

        def step(self, said):                                  # what the model said in its turn
            self.left -= 1
            return Turn(f"{self.left} to go\\n", reward=float("down" in said), done=self.left == 0)

Each episode has its own object in its own process, so that one that hangs or crashes harms no other. `seed` is the only source of
randomness; it also seeds `random` and NumPy's global generator. Completions of one prompt get the same seed, since their rewards are
compared, and a repeated run gets it again.

If prompts are lists of messages, `step` receives the assistant's message, with its `tool_calls` if it called tools, and with
`malformed` if it seems to have tried. An observation is then one message of the user (or of the role in the attribute `role`), or a
list of messages. JSON schemas in the attribute `tools` are shown to the model. This file needs the standard library alone.

A classmethod `prepare`, if there is one, is called once with the arguments of the class, before any object is made: all processes share
the data that it loads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Observation = str | Sequence[Mapping[str, Any]] | None


class Turn(NamedTuple):
    """The reply of an environment to a model turn.

    observation: the input of the model's next turn; that of the last turn is dropped.
    reward: the reward of this turn; None: no reward. The rewards of all turns are added, unless `objective.credit` credits turns. A
        completion without any reward is missing one.
    done: whether the episode is over.
    cut: whether a limit of the environment ended it, as Gymnasium's `truncated`.
    counts: numbers by metric, which are added up over all completions of a rollout.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    cut: bool = False
    counts: Mapping[str, float] = {}


class Environment(Protocol):
    """The interface of an environment. `reset` is given those of `prompt`, `seed` and the columns of the data that it has parameters
    for."""

    def reset(self, **given: Any) -> Observation: ...

    def step(self, said: Any) -> Turn: ...
