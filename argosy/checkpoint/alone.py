"""The calls of `parallel.processes` for a process that acts alone, whatever others the run has: a reader of its checkpoints."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def _made(_name: str, make: Callable[[], Any]) -> Any:
    return make()


ALONE = SimpleNamespace(
    process_count=lambda: 1,
    rank=lambda: 0,
    leads=lambda: True,
    broadcast=_made,
    run_together=_made,
    all_gather=lambda _name, value: [value],
)
