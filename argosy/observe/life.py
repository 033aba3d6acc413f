"""Where the wall time of a run went over all its starts, kills and the time between them.

    life/0.jsonl, life/1.jsonl, ...     one file for each process of the run; what one start writes replaces nothing of another

A start writes a line when it has restored, when it has compiled, with each checkpoint, every few seconds while it trains, and when it
ends. Each line holds all seconds of the start up to then, so the last complete one counts, and a torn one costs a few seconds:

    {"start": "9f3c...", "began": 1763900000.0, "elapsed": 61.5, "from": 0, "step": 120, "seconds": {"step": 40.0, ...}}

`account` adds them up. Beside the causes of `Clock` there are

    lost    what came after the checkpoint that a later start resumed from, or that a rollback went back to: those steps were made again
    down    from the last sign of life of a start to the next start

and together they are the time from the first start to the last sign of life. No part of a start is counted twice.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.storage import Store
from argosy.observe.goodput import Clock
from argosy.observe.metrics import read

FOLDER = "life"
# A line at most this often, beside those of checkpoints.
EVERY_S = 5.0
LOST, DOWN, WAITING = "lost", "down", "waiting"
# Causes in which a run does what it was started for.
USEFUL = ("step", "rollouts")
# When this process began, where it was started for one run.
_began: list[float] = []


def counts_from_process_start() -> None:
    """The next run of this process counts from the start of the process: imports and joining the others are part of it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        _began[:] = [time.time() - age]


class RunLife:
    """Writes the life of one start of a run.

    Args:
        store: the run directory.
        clock: the clock of this start.
        process: index of this process.
    """

    def __init__(self, store: Store, clock: Clock, process: int = 0):
        self.store, self.clock, self.file = store, clock, f"{FOLDER}/{process}.jsonl"
        now = time.time()
        # Of the clock, which began before this object did.
        start = now - clock.elapsed
        self.began = min(_began.pop(), start) if _began else start
        self.before = start - self.began
        self.about = {"start": uuid4().hex[:12], "began": self.began}
        self.step: int | None = None
        self._written = 0.0

    def begins(self, step: int, gang: str | None = None) -> None:
        """The state is there. step: updates made so far. gang: one name for this start in all processes that make it together."""
        self.about["from"] = self.step = step
        if gang is not None:
            self.about["gang"] = gang
        self.sign()

    def steps(self) -> None:
        """Called once for each update that was begun."""
        assert self.step is not None
        self.step += 1
        if time.monotonic() - self._written > EVERY_S:
            self.sign()

    def saved(self, step: int) -> None:
        """A checkpoint of this step is being written: a later start may resume from it."""
        self.step = step
        self.sign()

    def went_back(self, step: int) -> None:
        """The run was rolled back to the checkpoint of this step: the steps since then are lost."""
        self.sign()
        self.saved(step)

    def sign(self, **more: Any) -> None:
        """Writes all seconds up to now. A disk that is full costs the line, not the run."""
        seconds = self.clock.shares()
        seconds["start"] = seconds.get("start", 0.0) + self.before
        line = self.about | {"elapsed": sum(seconds.values()), "step": self.step, "seconds": seconds} | more
        self._written = time.monotonic()
        with suppress(ArgosyError):
            self.store.append_line(self.file, json.dumps(line))
            if more:
                self.store.flush()


# ---------------------------------------------------------------- adding up


@dataclass(frozen=True)
class Account:
    """The time of a run by cause.

    wall: seconds from the first start to the last sign of life; the sum of all causes.
    starts: number of starts.
    lost_steps: number of updates that were repeated.
    by_process: seconds of each process, for a run of several.
    """

    starts: int
    wall: float
    seconds: Mapping[str, float]
    lost_steps: int = 0
    by_process: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """The share of wall time that went into updates that were kept."""
        return sum(self.seconds.get(cause, 0.0) for cause in USEFUL) / self.wall if self.wall else 0.0

    def words(self) -> str:
        """One line: the goodput, and the causes of the rest, the largest first."""
        rest = {cause: s for cause, s in self.seconds.items() if cause not in USEFUL and s >= 0.005 * self.wall}
        shares = [f"{cause} {s / self.wall:.1%}" for cause, s in sorted(rest.items(), key=lambda item: -item[1])] if self.wall else []
        again = f"; {plural(self.lost_steps, 'step')} made again" if self.lost_steps else ""
        return f"goodput {self.goodput:.1%} over {plural(self.starts, 'start')}{again}" + "".join(f"; {share}" for share in shares)

    def document(self) -> dict[str, Any]:
        return vars(self) | {"goodput": self.goodput}


def account(store: Store) -> Account | None:
    """The life of the run in a directory, by its first process; None if nothing is written.

    A step takes as long in all of several processes. One that waited for another in it shows a longer `step`, and the other a
    longer cause of its own: what exceeds the shortest `step` of those that made a start together is `waiting` in `by_process`.
    """
    every = {int(name.partition(".")[0]): _read(store, name) for name in store.list(FOLDER) if name.partition(".")[0].isdecimal()}
    first = every.get(0) or []
    if not first:
        return None
    whole = _add_up(first)
    if len(every) == 1:
        return whole
    by_process = {process: dict(_add_up(starts).seconds) for process, starts in sorted(every.items()) if starts}
    for process, waited in _waiting_seconds(every).items():
        by_process[process] |= {WAITING: waited, "step": by_process[process]["step"] - waited}
    # What the first process waited in steps is no work of its own.
    return Account(whole.starts, whole.wall, by_process[0], whole.lost_steps, by_process)


def _waiting_seconds(every: Mapping[int, Sequence[Sequence[Mapping[str, Any]]]]) -> dict[int, float]:
    """Seconds that each process waited for others in steps. Processes may come and go between starts: only those of a start are
    compared, and a start that tells no gang is left out."""
    gangs: dict[str, dict[int, float]] = {}
    for process, starts in every.items():
        for lines, (seconds, _) in zip(starts, _start_accounts(starts), strict=True):
            if "gang" in lines[-1] and "step" in seconds:
                gangs.setdefault(str(lines[-1]["gang"]), {})[process] = seconds["step"]
    waited: dict[int, float] = {}
    for steps in gangs.values():
        least = min(steps.values())
        for process, step_seconds in steps.items():
            waited[process] = waited.get(process, 0.0) + step_seconds - least
    return waited


def _read(store: Store, name: str) -> list[list[dict[str, Any]]]:
    """The lines of each start, in the order of the file, which is that of the starts whatever their clocks say. Lines that a kill tore
    are left out."""
    starts: dict[str, list[dict[str, Any]]] = {}
    for line in read(store, f"{FOLDER}/{name}"):
        if isinstance(line, dict) and {"start", "began", "elapsed", "seconds"} <= set(line):
            starts.setdefault(str(line["start"]), []).append(line)
    return list(starts.values())


def _add_up(starts: Sequence[Sequence[Mapping[str, Any]]]) -> Account:
    total: dict[str, float] = {}
    down, again, until = 0.0, 0, None
    for lines, (seconds, steps) in zip(starts, _start_accounts(starts), strict=True):
        last = lines[-1]
        # Where the clock was set back between two starts, nobody knows how long the run was down: no time is counted.
        down += max(0.0, last["began"] - until) if until is not None else 0.0
        until = last["began"] + last["elapsed"]
        again += steps
        for cause, s in seconds.items():
            total[cause] = total.get(cause, 0.0) + s
    if down:
        total[DOWN] = down
    return Account(len(starts), sum(total.values()), total, again)


def _start_accounts(starts: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[dict[str, float], int]]:
    """Seconds by cause of each start, and the steps that it had to repeat."""
    begun = [[min(line["from"], line["step"]) for line in _begun(lines)] for lines in starts]
    # The earliest step that a later start resumed from, or went back to.
    return [_start_seconds(lines, min((s for steps in begun[i + 1 :] for s in steps), default=None)) for i, lines in enumerate(starts)]


def _begun(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Before it begins with a step, a start has nothing to lose."""
    return [line for line in lines if line.get("from") is not None and line.get("step") is not None]


def _start_seconds(lines: Sequence[Mapping[str, Any]], until: int | None) -> tuple[dict[str, float], int]:
    """Seconds of one start by cause, and the steps of it that were made again. until: the earliest step that a later start resumed
    from."""
    last, begun = lines[-1], _begun(lines)
    if not begun:
        return dict(last["seconds"]), 0
    by_line, again = _with_rollbacks(begun)
    if until is None or last["step"] <= until:
        return by_line[-1], again
    good = max((i for i, line in enumerate(begun) if line["step"] <= until), default=0)
    before = begun[good]
    seconds = by_line[good] | {LOST: by_line[good].get(LOST, 0.0) + last["elapsed"] - before["elapsed"]}
    return seconds, again + last["step"] - max(until, before["step"])


def _with_rollbacks(begun: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], int]:
    """Seconds by cause of each line of a start, and the steps that it made again itself. Where the step falls, the start went back to a
    checkpoint: what it did since then is lost, except compiling and restoring."""
    by_line: list[dict[str, float]] = []
    lost: dict[str, float] = {}
    again = 0
    for i, line in enumerate(begun):
        now = {cause: s - lost.get(cause, 0.0) for cause, s in line["seconds"].items()}
        if i and line["step"] < begun[i - 1]["step"]:
            good = max((j for j in range(i) if begun[j]["step"] <= line["step"]), default=0)
            again += begun[i - 1]["step"] - max(line["step"], begun[good]["step"])
            for cause in set(now) - {"start", "compile"}:
                since = now[cause] - by_line[good].get(cause, 0.0)
                lost[cause], now[cause] = lost.get(cause, 0.0) + since, now[cause] - since
        by_line.append(now | ({LOST: sum(lost.values())} if lost else {}))
    return by_line, again
