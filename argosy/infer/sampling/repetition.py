"""Detects completions that repeat themselves. No jax here."""

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.core.errors import BadInput


@dataclass(frozen=True)
class Repetition:
    """Detects that a completion ends with the same pattern `count` times in a row. Calling it with the completion's tokens returns
    whether it does.

    longest: the most tokens of a pattern.
    count: how many times the pattern occurs, at least 2.
    shortest: the fewest tokens of a pattern.

    Raises:
        BadInput: `count` is below 2, or not 1 <= shortest <= longest.
    """

    longest: int
    count: int
    shortest: int = 1

    def __post_init__(self) -> None:
        if self.count < 2:
            raise BadInput(f"a pattern that occurs {self.count} times is no repetition", hint="at least 2")
        if not 1 <= self.shortest <= self.longest:
            raise BadInput(f"no pattern has {self.shortest} to {self.longest} tokens")

    def __call__(self, answer: Sequence[int]) -> bool:
        for size in range(self.shortest, min(self.longest, len(answer) // self.count) + 1):
            # Each token equals the one `size` tokens before it. Most patterns differ at the first token that is compared.
            if all(answer[-i] == answer[-i - size] for i in range(1, size * (self.count - 1) + 1)):
                return True
        return False
