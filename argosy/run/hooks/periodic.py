"""Hooks that run every few steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Every:
    """A hook that runs every `every` steps, and at the last step."""

    name: str
    every: int
    do: Callable[[Any], None]

    def due(self, step: int, last: bool) -> bool:
        return last or step % self.every == 0

    def __call__(self, now: Any) -> None:
        self.do(now)


@dataclass(frozen=True)
class Between(Every):
    """A hook that runs every `every` steps, but not at the last step."""

    def due(self, step: int, last: bool) -> bool:
        return not last and step % self.every == 0


def is_stopping(now: Any, steps: int) -> bool:
    """Whether a signal asked the run to stop; hooks then only save."""
    return now.last and now.step < steps
