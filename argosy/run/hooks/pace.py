"""Measures the time of each process, so that a slow process that the others wait for can be named (`observe.stragglers`).

Each process adds up the host's seconds around each step, and times its devices every few steps. A thread sends the times to the leader
(process 0), which compares them. No process waits for another here, so a stop, a rollback or the end of a process cannot block. The
leader decides how often devices are timed, so that timing takes at most the share `SHARE` of the time.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from argosy.observe.goodput import Clock
from argosy.observe.stragglers import DATA, HOST, KEY, ON_HOST, STALLS, Comparison, ProcessTimes, StragglerVerdict
from argosy.parallel import processes
from argosy.parallel.probe import Probe
from argosy.train.straggler_settings import StragglerSettings

# The most of the time that goes into timing devices.
SHARE = 0.003
# The thread sleeps this long, and was stopped where it slept this much longer.
TICK_S, LATE_S = 0.05, 0.02
# Seconds between two messages of a process; of many processes each says less, so that the leader hears 500 a second.
SAY_S, MOST_A_SECOND = 0.5, 500
CLOSE_S = 2.0

Update = Callable[[Any, Any], tuple[Any, Any]]


class PaceMeter:
    """Measures the time of this process.

    Args:
        devices: the devices of this process that train. Its other devices may be busy between two steps.
        clock: the clock of the run.
        step: () -> the number of the current step.
        say: called with messages.
        write: called with a line for metrics.jsonl.
    """

    def __init__(
        self,
        settings: StragglerSettings,
        devices: Sequence[Any],
        clock: Clock,
        step: Callable[[], int],
        say: Callable[[str], None],
        write: Callable[[dict[str, Any]], None],
    ):
        self.how, self.clock, self.step, self.say, self.write = settings, clock, step, say, write
        # CPU devices share their processors, so one stands for all.
        self.probe = Probe(devices[:1] if devices[0].platform == "cpu" else devices)
        self.compare = Comparison(settings.every, settings.ratio, settings.windows)
        self.several = processes.process_count() > 1
        self.pause = max(SAY_S, processes.process_count() / MOST_A_SECOND)
        self.host = socket.gethostname()
        # A CPU that stands still computes nothing; other devices have a step queued.
        self.computes_itself = self.probe.devices[0].platform == "cpu"
        self.steps, self.stalled = 0, 0.0
        self.seconds: dict[str, float] = dict.fromkeys(ON_HOST, 0.0)
        self.exposed: dict[str, float] = dict.fromkeys(ON_HOST, 0.0)
        self.probes, self.devices, self.probe_s = 0, [0.0] * len(self.probe.devices), self.probe.took_s
        # Steps between two timings, as the leader said.
        self.spacing: int | None = None
        self._before: tuple[float, dict[str, float], float] | None = None
        self._last: Any = None
        self._now: ProcessTimes | None = None
        self._new: deque[StragglerVerdict] = deque()
        self._board = processes.Board("pace") if self.several else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pace", daemon=True)
        self._thread.start()

    def __call__(self, update: Update) -> Update:
        """Wraps a step so that it is measured."""

        def measured(state: Any, batch: Any) -> tuple[Any, Any]:
            self._begins()
            outcome = update(state, batch)
            # Some metrics are numbers of the host.
            self._last = [array for array in jax.tree.leaves(outcome[1]) if hasattr(array, "is_ready")][:1]
            return outcome

        return measured

    def close(self) -> None:
        self._over.set()
        # Where the leader does not answer any more, its message never ends.
        self._thread.join(CLOSE_S)
        self.probe.close()
        self._tell()

    # ---------------------------------------------------------------- between two steps

    def _begins(self) -> None:
        """Adds up the times since the last step. Called just before the next step is dispatched."""
        elapsed, spent, stalled = self.clock.elapsed, dict(self.clock.seconds), self.stalled
        if self._before is not None:
            then, before, stood = self._before
            new = {
                DATA: spent.get("data", 0.0) - before.get("data", 0.0),
                HOST: max(0.0, elapsed - then - sum(spent.values()) + sum(before.values())),
                STALLS: stalled - stood,
            }
            # Done before this one is dispatched: the devices had nothing to do.
            waited = all(array.is_ready() for array in self._last or ())
            for cause, s in new.items():
                self.seconds[cause] += s
                if waited or (cause == STALLS and self.computes_itself):
                    self.exposed[cause] += s
        self._before = elapsed, spent, stalled
        self.steps += 1
        if self.spacing and self.steps % self.spacing == 0:
            self._time_devices()
        self._now = ProcessTimes(
            self.steps, elapsed, dict(self.seconds), dict(self.exposed), self.host, self.probes, list(self.devices)
        )
        self._tell()

    def _time_devices(self) -> None:
        jax.block_until_ready(self._last)
        start = time.perf_counter()
        for i, s in enumerate(self.probe()):
            self.devices[i] += s
        self.probe_s = time.perf_counter() - start
        self.probes += 1

    def _tell(self) -> None:
        """Reports what the thread found."""
        while self._new:
            verdict, step = self._new.popleft(), self.step()
            self.say(verdict.words())
            self.write({"step": step, KEY: verdict.document()})

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        due = 0.0
        while True:
            start = time.perf_counter()
            if self._over.wait(TICK_S):
                return
            now = time.perf_counter()
            late = now - start - TICK_S
            if late > LATE_S:
                self.stalled += late
            if now < due or self._now is None:
                continue
            due = now + self.pause
            try:
                self._exchange(self._now)
            except jax.errors.JaxRuntimeError:
                # The leader is gone, which ends the others by other ways.
                return

    def _exchange(self, now: ProcessTimes) -> None:
        """Sends the times of this process. In the leader, compares the times of all processes."""
        if self._board is None:
            self._new += self.compare({0: now})
            self.spacing = self.spaced()
        elif processes.leads():
            self._board.say(vars(now) | {"spacing": self.spacing})
            every = self._board.all()
            if len(every) == processes.process_count():
                self._new += self.compare({p: _pace_words(message) for p, message in sorted(every.items())})
                self.spacing = self.spaced()
        else:
            self._board.say(vars(now))
            self.spacing = (self._board.leaders() or {}).get("spacing")

    def spaced(self) -> int | None:
        """Returns the number of steps between two timings of devices; None until the duration of a step is known."""
        if self.compare.step_s is None:
            return None
        least = math.ceil(self.probe_s / (SHARE * self.compare.step_s) / self.how.every) * self.how.every
        # All processes time at the same steps, so it is said again only where it changed much.
        return self.spacing if self.spacing and least <= self.spacing <= 4 * least else least


def _pace_words(document: dict[str, Any]) -> ProcessTimes:
    """Makes the times of a process from the message that it sent."""
    return ProcessTimes(**{name: value for name, value in document.items() if name in ProcessTimes.__dataclass_fields__})


@contextmanager
def measured_pace(
    settings: StragglerSettings, devices: Sequence[Any], clock: Clock, *more: Any
) -> Iterator[Callable[[Update], Update]]:
    """A context in which steps are measured, if there are several processes, or several devices that are not the cores of one CPU.
    Yields a function that wraps a step.

    Args:
        more: further arguments of `PaceMeter`.
    """
    if not settings.every or (processes.process_count() == 1 and (len(devices) == 1 or devices[0].platform == "cpu")):
        yield lambda update: update
        return
    with clock("compile"):
        pace = PaceMeter(settings, devices, clock, *more)
    try:
        yield pace
    finally:
        pace.close()
