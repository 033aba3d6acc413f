"""Coordinates the processes of a run. They compare their settings, stop together, and end if they are stuck."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.shared import check_shared
from argosy.core.process.signals import Stop
from argosy.core.settings import Reading, dump
from argosy.core.storage import Store
from argosy.launch.cluster import STACKS, STUCK
from argosy.observe.environment import versions
from argosy.observe.stacks import Watchdog
from argosy.parallel import processes
from argosy.run.settings.run import Run

# The others end at once with their leader. So it counts as stuck later than they do: they say where they are before.
LEADER_LATER_S = 5.0


def check_same_run(reading: Reading[Run]) -> None:
    """Checks that all processes run the same version with the same settings, in a folder that all of them share.

    Raises:
        UserError: processes differ.
    """
    if processes.process_count() == 1:
        return
    installed = {name: version for name, version in versions().items() if name in ("argosy", "jax", "jaxlib", "flax", "optax")}
    hints = {"settings": "start every process with the same words", "version": "install the same packages everywhere"}
    processes.check_same_facts({"version": json.dumps(installed), "settings": json.dumps(dump(reading.value), sort_keys=True)}, hints)
    check_shared(Store(str(reading.value.dir)))


@dataclass(frozen=True)
class RunWatch:
    """The stop conditions of a run.

    stop: called once per step; returns whether to stop after the step.
    between: returns whether to give up work between two steps, such as an evaluation.
    patiently: wraps a hook, so that it may take long without counting as stuck.
    """

    stop: Callable[[], bool]
    between: Callable[[], bool]
    patiently: Callable[[Any], Any] = lambda do: do


@contextmanager
def watch_stops(signaled: Stop) -> Iterator[RunWatch]:
    """A context that yields the stop conditions of a run. With several processes, all stop after the same step, and none gives up work
    between two steps. If a supervisor started this process, the process ends when it is stuck.

    Args:
        signaled: tells whether a signal asked this process to stop.
    """
    several = processes.process_count() > 1
    with ExitStack() as stack:
        stop: Callable[[], bool] = signaled
        if several:

            def follow(code: int) -> None:
                signaled.code = signaled.code or code

            stop = stack.enter_context(closing(processes.Stopping(signaled, lambda: signaled.code, follow)))
        between = (lambda: False) if several else signaled
        if STUCK not in os.environ:
            yield RunWatch(stop, between)
            return
        folder = os.environ.get(STACKS)
        later = LEADER_LATER_S if several and processes.leads() else 0.0
        dog = stack.enter_context(closing(Watchdog(float(os.environ[STUCK]), Path(folder) if folder else None, later)))

        def step() -> bool:
            dog.alive()
            return stop()

        yield RunWatch(step, between, dog.patiently)
