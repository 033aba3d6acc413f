"""The calls of `parallel.processes` for a process that acts alone, whatever others the run has: a reader of its checkpoints."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def _made(_name: str, make: Callable[[], Any]) -> Any:
    return make()


ALONE = SimpleNamespace(
    count=lambda: 1, rank=lambda: 0, leads=lambda: True, told=_made, together=_made, collected=lambda _name, value: [value]
)
