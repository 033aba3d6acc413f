"""What batches that are made from answers have in common: updates in a queue, a position that keeps them, and the next prompts.

Updates that are left of a rollout are arrays beside the position, since the weights that sampled them are gone.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from argosy.core.errors import BadInput, UserError, refuse
from argosy.data.batch import Batches
from argosy.data.order import whole_numbers
from argosy.data.rows.prompts import Prompt
from argosy.rl.rollouts.completions import Interrupted, SamplersLost
from argosy.rl.rollouts.packing import Experience, Shape, restored, stored
from argosy.rl.rollouts.records import Ended
from argosy.rl.rollouts.settings import Rollout

# Prompts that are looked at for one that fits before it is an error, as a multiple of all.
LOOKED_AT = 2
NUMBERS = ("place", "rollout", "tokens")

T = TypeVar("T")
K = TypeVar("K")


class Queued(Batches):
    """Updates of one rollout after the other.

    place: in the prompts, after the last rollout. number: rollouts so far. tokens: of all updates that were handed out. failed: why
    there are no more, where that is an error: the run ends with it when it has saved.
    """

    bytes_per_token = None
    depends = True

    def __init__(self) -> None:
        self.queue: list[Experience] = []
        # Of a position that was sought: what belongs to the arrays that follow.
        self.waiting: Sequence[Any] = ()
        self.place = self.number = self.tokens = 0
        self.failed: SamplersLost | None = None

    @abstractmethod
    def played(self, state: Any) -> list[Experience]:
        """The updates of the next rollout. If it raises, the position is what it was.

        Raises:
            Interrupted: it was given up. Ended: too few prompts are left. SamplersLost: what samples elsewhere cannot go on.
        """

    def advance(self, state: Any) -> None:
        """Makes a rollout with the weights of a state, unless updates of the last one are left.

        Raises:
            ArgosyError: nothing can be learned, or no prompt fits.
        """
        if self.queue or self.failed is not None:
            return
        try:
            self.queue = self.played(state)
        except (Interrupted, Ended):
            pass
        except SamplersLost as error:
            self.failed = error

    def __next__(self) -> Any:
        if not self.queue:
            raise StopIteration
        made = self.queue.pop(0)
        self.tokens += sum(int(np.sum(part["segments"] > 0)) for part in made.parts)
        return Experience(made.parts, made.numbers | {"tokens": self.tokens})

    def position(self) -> dict[str, Any]:
        return {"place": self.place, "rollout": self.number, "tokens": self.tokens, "waiting": stored(self.queue)[1]}

    def seek(self, position: dict[str, Any]) -> None:
        found = whole_numbers({name: position[name] for name in NUMBERS}, NUMBERS)
        self.place, self.number, self.tokens = found.values()
        self.queue, self.waiting = [], list(position.get("waiting", ()))

    def arrays(self) -> dict[str, np.ndarray]:
        return stored(self.queue)[0]

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        self.queue, self.waiting = restored(arrays, self.waiting), ()


def next_that_fit(
    prompts: Callable[[int, int], Sequence[T]], place: int, count: int, fit: Callable[[Sequence[T]], list[K]], longest: int, most: int
) -> tuple[list[K], int]:
    """The next prompts that fit, and the place after them.

    Args:
        prompts: (first, count) -> those at these places, fewer where they end. fit: keeps those that fit.
        longest: tokens of a prompt, for the error. most: places that may be passed over.

    Raises:
        Ended: too few are left. BadInput: none fits.
    """
    out: list[K] = []
    begin = place
    while len(out) < count:
        found = prompts(place, count - len(out))
        if not found:
            raise Ended("the epochs of the prompts are over")
        place += len(found)
        out += fit(found)
        if place - begin - len(out) > most:
            what = f"no prompt to learn from has at most {longest} tokens, data.sequence - rollout.tokens"
            raise BadInput(what, hint="raise data.sequence, or lower rollout.tokens")
    return out, place


def no_room(prompt: Prompt, longest: int) -> str:
    """What is said of a prompt that is too long."""
    return (
        f"{prompt.where}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer and is passed over, as are others of "
        f"more than {longest} (data.sequence - rollout.tokens)"
    )


def check_sizes(batch: int, rollout: Rollout, shape: Shape, most: int | None, asked: int) -> None:
    """Checks that the answers of a rollout divide into groups and updates, and that there is room for a prompt before each.

    Args:
        most: prompts of all epochs; None: they do not end. asked: prompts of a rollout, at most.

    Raises:
        UserError: they do not, or there is none.
    """
    mistakes: list[UserError] = []
    n = rollout.completions
    if batch % (n * rollout.minibatches):
        by = f" and {rollout.minibatches} updates" if rollout.minibatches > 1 else ""
        what = f"data.batch = {batch} answers do not divide into groups of {n}{by}"
        mistakes.append(BadInput(what, hint=f"make it a multiple of {n * rollout.minibatches}"))
    if shape.sequence <= rollout.tokens:
        what = f"data.sequence = {shape.sequence} has no room for a prompt before an answer of {rollout.tokens} tokens"
        mistakes.append(BadInput(what, where="rollout.tokens", hint="raise data.sequence, or lower rollout.tokens"))
    if most is not None and most < asked:
        what = f"data.epochs: {most} prompts are fewer than the {asked} of a rollout"
        mistakes.append(BadInput(what, hint="raise data.epochs, or lower data.batch"))
    refuse(mistakes)
