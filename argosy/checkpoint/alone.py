"""The calls of `parallel.processes` for a process that reads checkpoints by itself. They do not communicate with other processes of the
run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def _call(_name: str, make: Callable[[], Any]) -> Any:
    return make()


ALONE = SimpleNamespace(
    process_count=lambda: 1,
    rank=lambda: 0,
    leads=lambda: True,
    broadcast=_call,
    run_together=_call,
    all_gather=lambda _name, value: [value],
)
