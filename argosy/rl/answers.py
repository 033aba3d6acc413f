"""Answers to prompts, sampled by the engine with the weights of the moment.

Every rollout has random streams of its own: the run's seed, the number of the rollout and the place of the answer decide them, and
nothing else does. The end-of-sequence token is part of an answer and is learned, because without it stopping is never learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.data.prompts import Prompt
from argosy.infer.lm import LM
from argosy.infer.request import Request
from argosy.infer.sample import Sampling

# Kinds of random streams of a run, which never overlap.
ROLLOUT, EVALUATION = 0, 1


class Interrupted(ArgosyError):
    """A signal asked the run to stop while answers were generated; they are given up."""


@dataclass
class Played:
    """How an answer of several turns went.

    turns: messages of the assistant and of the environment, in order; those of a text have the environment's role. reward: the sum of
    those that the environment gave; None: it gave none. made: turns of the model. failure: why the answer has no reward (`raised`,
    `timed out`, `died`, `not rendered`), with its message. why: it is over (`done`, `environment`, `turns`, `room`, `failed`).
    observed: tokens of the environment. cut: observations that were too long. counts: what the environment counted. begun: the tokens
    of the prompt, if the environment spoke first.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    made: int = 0
    failure: tuple[str, str] | None = None
    why: str = "room"
    observed: int = 0
    cut: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    begun: list[int] | None = None


@dataclass
class Answer:
    """An answer to a prompt.

    tokens: after the prompt, the end-of-sequence token included. live: whether the policy made each of them; an environment made the
    others. logprobs: of each in the distribution that it was drawn from; NaN for the environment's. ended: by its own end, not by the
    limit. text: of the tokens, without the end. played: with an environment, how it went.
    """

    prompt: Prompt
    tokens: list[int]
    live: list[bool]
    logprobs: list[float]
    ended: bool
    text: str
    played: Played | None = None

    @property
    def said(self) -> Any:
        """The answer as rewards read it: a text, or messages where the prompt is messages, as in TRL. With an environment all turns."""
        if self.played is not None and not isinstance(self.prompt.asked, str):
            return [{name: item for name, item in one.items() if name != "reward"} for one in self.played.turns]
        return self.text if isinstance(self.prompt.asked, str) else [{"role": "assistant", "content": self.text}]


def sampled(
    lm: LM,
    prompts: Sequence[Prompt],
    most: int,
    sampling: Sampling,
    seed: tuple[int, ...],
    interrupted: Callable[[], bool] = lambda: False,
    ignore_eos: bool = False,
) -> list[Answer]:
    """One answer to each of these prompts, in their order; a prompt may occur several times.

    Args:
        most: tokens of an answer, its end included.
        seed: of this call alone. Answers to equal prompts differ by their place.
        interrupted: asked between steps.
        ignore_eos: no token ends an answer.

    Raises:
        Interrupted: it said yes.
    """
    ends = frozenset[int]() if ignore_eos else frozenset(lm.stops())
    requests = [Request(list(one.tokens), most, sampling, ends, seed, row) for row, one in enumerate(prompts)]
    engine = lm.engine([len(one.tokens) + most for one in prompts])
    answers = [Answer(one, [], [], [], False, "") for one in prompts]
    rows: dict[int, int] = {}
    try:
        for row, request in enumerate(requests):
            rows[engine.add(request)] = row
        while engine.busy:
            if interrupted():
                raise Interrupted("stopped while answers were generated")
            for event in engine.step():
                answer = answers[rows[event.id]]
                if event.token is None:
                    raise RuntimeError(f"an answer of a rollout ended by {event.reason}")
                answer.tokens.append(event.token)
                answer.live.append(True)
                answer.logprobs.append(event.drawn)
                answer.ended = event.reason == "stop"
    except BaseException:
        # Nobody knows what the engine holds after half a step.
        lm.forget()
        raise
    for answer in answers:
        shown = answer.tokens[:-1] if answer.ended else answer.tokens
        answer.text = lm.tokenizer.decode(shown) if lm.tokenizer is not None else " ".join(map(str, shown))
    return answers
