"""Finds the next prompts that leave room for a completion, and checks that the sizes of a rollout fit each other."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from argosy.core.errors import BadInput, UserError, raise_mistakes
from argosy.data.rows.prompts import Prompt
from argosy.rl.rollouts.packing import PartShape
from argosy.rl.rollouts.records import PromptsExhausted
from argosy.rl.rollouts.settings import Rollout

# Prompts that are looked at for one that fits before it is an error, as a multiple of all.
LOOKED_AT = 2

T = TypeVar("T")
K = TypeVar("K")


def next_that_fit(
    prompts: Callable[[int, int], Sequence[T]], place: int, count: int, fit: Callable[[Sequence[T]], list[K]], longest: int, most: int
) -> tuple[list[K], int]:
    """Returns the next `count` prompts that fit, and the index of the prompt after them.

    Args:
        prompts: (first, count) -> the prompts from index `first` on; fewer than `count` at the end of the data.
        place: the index of the first prompt to try.
        fit: selects the prompts that fit.
        longest: the largest length of a prompt in tokens, for the error message.
        most: the largest number of prompts that are skipped.

    Raises:
        PromptsExhausted: too few prompts are left.
        BadInput: no prompt fits.
    """
    out: list[K] = []
    begin = place
    while len(out) < count:
        candidates = prompts(place, count - len(out))
        if not candidates:
            raise PromptsExhausted("the epochs of the prompts are over")
        place += len(candidates)
        out += fit(candidates)
        if place - begin - len(out) > most:
            problem = f"no prompt to learn from has at most {longest} tokens, data.sequence - rollout.tokens"
            raise BadInput(problem, hint="raise data.sequence, or lower rollout.tokens")
    return out, place


def length_warning(prompt: Prompt, longest: int) -> str:
    """Makes the warning about a prompt that is too long.

    Args:
        longest: the largest length of a prompt in tokens.
    """
    return (
        f"{prompt.where}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer and is passed over, as are others of "
        f"more than {longest} (data.sequence - rollout.tokens)"
    )


def check_sizes(batch: int, rollout: Rollout, shape: PartShape, most: int | None, prompts: int) -> None:
    """Checks that the completions of a rollout divide into groups and updates, and that prompts have room before them.

    Args:
        batch: the number of completions in a rollout.
        most: the number of prompts in all epochs; None if they do not end.
        prompts: the largest number of prompts in a rollout.

    Raises:
        UserError: one of the sizes does not divide the other, or a row has no room for a prompt.
    """
    mistakes: list[UserError] = []
    n = rollout.completions
    if batch % (n * rollout.minibatches):
        by = f" and {rollout.minibatches} updates" if rollout.minibatches > 1 else ""
        problem = f"data.batch = {batch} answers do not divide into groups of {n}{by}"
        mistakes.append(BadInput(problem, hint=f"make it a multiple of {n * rollout.minibatches}"))
    if shape.sequence <= rollout.tokens:
        mistakes.append(no_room(shape.sequence, rollout.tokens))
    if most is not None and most < prompts:
        problem = f"data.epochs: {most} prompts are fewer than the {prompts} of a rollout"
        mistakes.append(BadInput(problem, hint="raise data.epochs, or lower data.batch"))
    raise_mistakes(mistakes)


def no_room(sequence: int, tokens: int) -> BadInput:
    """Makes the error that a row has no room for a prompt before a completion of `tokens` tokens."""
    problem = f"data.sequence = {sequence} has no room for a prompt before an answer of {tokens} tokens"
    hint = f"rollout.tokens={max(1, sequence // 2)}, or a longer data.sequence, at most the model's context"
    return BadInput(problem, where="rollout.tokens", hint=hint)
