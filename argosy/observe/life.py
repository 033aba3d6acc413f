"""Records how a run spends its wall time, over all its starts and the time between them.

    life/0.jsonl, life/1.jsonl, ...     a file for each process of the run, to which each start appends lines

A start writes a line after it restored the state, after compiling, with each checkpoint, every few seconds while it trains, and at its
end. Each line holds all seconds of the start so far, so only the last complete line counts. An incomplete line costs a few seconds:

    {"start": "9f3c...", "began": 1763900000.0, "elapsed": 61.5, "from": 0, "step": 120, "seconds": {"step": 40.0, ...}}

`account` adds up the starts. Beside the causes of `Clock` there are two more:

    lost    the time of steps that were repeated, because a later start resumed from an earlier checkpoint or a rollback went back to it
    down    the time from the last line of a start to the next start

All causes together are the time from the first start to the last line. No part of a start is counted twice.
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
# The least seconds between two lines, apart from those of checkpoints.
EVERY_S = 5.0
LOST, DOWN, WAITING = "lost", "down", "waiting"
# The causes that count as useful for the goodput.
USEFUL = ("step", "rollouts")
# The time at which this process began, if it was started for a single run.
_began: list[float] = []


def counts_from_process_start() -> None:
    """Lets the time of the next run count from the start of this process, so that it includes imports and joining other processes."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        _began[:] = [time.time() - age]


class RunLife:
    """Writes the lines of one start of a run.

    Args:
        store: the run directory.
        clock: the clock of this start.
        process: the rank of this process.
    """

    def __init__(self, store: Store, clock: Clock, process: int = 0):
        self.store, self.clock, self.file = store, clock, f"{FOLDER}/{process}.jsonl"
        now = time.time()
        # The start of the clock, which began before this object was created.
        start = now - clock.elapsed
        self.began = min(_began.pop(), start) if _began else start
        self.before = start - self.began
        self.about = {"start": uuid4().hex[:12], "began": self.began}
        self.step: int | None = None
        self._written = 0.0

    def begins(self, step: int, gang: str | None = None) -> None:
        """Records that the state is restored or initialized.

        Args:
            step: the number of updates made so far.
            gang: a name of this start that all processes of the start share.
        """
        self.about["from"] = self.step = step
        if gang is not None:
            self.about["gang"] = gang
        self.sign()

    def steps(self) -> None:
        """Counts an update. Called when each update begins."""
        assert self.step is not None
        self.step += 1
        if time.monotonic() - self._written > EVERY_S:
            self.sign()

    def saved(self, step: int) -> None:
        """Records that a checkpoint of this step is being written, from which a later start may resume."""
        self.step = step
        self.sign()

    def went_back(self, step: int) -> None:
        """Records a rollback to the checkpoint of this step. The steps since then are lost."""
        self.sign()
        self.saved(step)

    def sign(self, **more: Any) -> None:
        """Writes a line with all seconds up to now. If the disk is full, the line is lost and the run goes on. `more`: further keys."""
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

    starts: the number of starts.
    wall: the seconds from the first start to the last line, which is the sum of all causes.
    seconds: the seconds of each cause.
    lost_steps: the number of updates that were repeated.
    by_process: the seconds by cause of each process, for a run of several processes.
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
        """Returns the goodput and the other causes in one line, the largest first."""
        rest = {cause: s for cause, s in self.seconds.items() if cause not in USEFUL and s >= 0.005 * self.wall}
        shares = [f"{cause} {s / self.wall:.1%}" for cause, s in sorted(rest.items(), key=lambda item: -item[1])] if self.wall else []
        again = f"; {plural(self.lost_steps, 'step')} made again" if self.lost_steps else ""
        return f"goodput {self.goodput:.1%} over {plural(self.starts, 'start')}{again}" + "".join(f"; {share}" for share in shares)

    def document(self) -> dict[str, Any]:
        return vars(self) | {"goodput": self.goodput}


def account(store: Store) -> Account | None:
    """Adds up the time of the run in a directory, as its first process recorded it. None if nothing is recorded.

    All processes finish a step at the same time. A process that waited for another one inside the step has a longer `step`, and the
    other has a longer cause of its own. So in `by_process`, the time of a process beyond the shortest `step` of its start is
    `waiting`.
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
    # The time that the first process waited in steps is not its own work.
    return Account(whole.starts, whole.wall, by_process[0], whole.lost_steps, by_process)


def _waiting_seconds(every: Mapping[int, Sequence[Sequence[Mapping[str, Any]]]]) -> dict[int, float]:
    """Returns the seconds that each process waited for others in steps. Only processes of the same start are compared, because the
    number of processes may change between starts. Starts without the key `gang` are left out."""
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
    """Reads the lines of each start. Starts are in the order of the file, which does not depend on clocks. Lines that a killed process
    left incomplete are skipped."""
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
        # If the clock was set back between two starts, the time between them is unknown and not counted.
        down += max(0.0, last["began"] - until) if until is not None else 0.0
        until = last["began"] + last["elapsed"]
        again += steps
        for cause, s in seconds.items():
            total[cause] = total.get(cause, 0.0) + s
    if down:
        total[DOWN] = down
    return Account(len(starts), sum(total.values()), total, again)


def _start_accounts(starts: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[dict[str, float], int]]:
    """Returns, for each start, its seconds by cause and the number of its steps that were repeated later."""
    begun = [[min(line["from"], line["step"]) for line in _begun(lines)] for lines in starts]
    # The steps of a start after the earliest step that a later start resumed from or went back to are lost.
    return [_start_seconds(lines, min((s for steps in begun[i + 1 :] for s in steps), default=None)) for i, lines in enumerate(starts)]


def _begun(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the lines of a start from its first step on. Earlier time cannot be lost."""
    return [line for line in lines if line.get("from") is not None and line.get("step") is not None]


def _start_seconds(lines: Sequence[Mapping[str, Any]], until: int | None) -> tuple[dict[str, float], int]:
    """Returns the seconds of one start by cause, and the number of its steps that were repeated. `until`: the earliest step that a
    later start resumed from, None if there is none."""
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
    """Returns the seconds by cause at each line of a start, and the number of steps that the start itself repeated. Where the step
    decreases, the start rolled back to a checkpoint, and its time since that checkpoint is lost, except compiling and restoring."""
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
