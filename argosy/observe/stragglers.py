"""Which process of a run the others wait for.

In synchronous training a step takes as long in all processes, because those that are fast wait for the slowest inside the step. So what
is compared is what each spends by itself:

    data       seconds until its next batch is there
    host       seconds in Python beside: callbacks, logging, garbage collection
    stalls     seconds in which it did not run at all: stopped, or kept from a processor
    device     seconds of a program without collectives, the same on every device

Time of the host counts only where the devices were idle when it ended (`exposed`): what is done while they compute holds nobody up.
This module knows no processes and no devices, only the numbers that each process told.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DATA: str = "data"
HOST: str = "host"
STALLS: str = "stalls"
DEVICE: str = "device"
ON_HOST = (DATA, HOST, STALLS)
# A window takes at least this long, however fast steps are.
LEAST_S = 1.0
# The smallest share of a step by which a host is slow.
SHARE = 0.1
# The metrics line of a process that is slow, or is no longer.
KEY = "straggler"

TAKES = {DATA: "its data takes", HOST: "its Python between steps takes"}


@dataclass(frozen=True)
class ProcessTimes:
    """The times that a process reports, since it began.

    steps: number of its steps.
    wall: seconds of wall time.
    seconds: host seconds by cause.
    exposed: the part of `seconds` in which devices waited.
    probes: number of timings of its devices.
    devices: total seconds of these timings, for each of its devices.
    """

    steps: int
    wall: float
    seconds: Mapping[str, float]
    exposed: Mapping[str, float]
    host: str = ""
    probes: int = 0
    devices: Sequence[float] = ()


@dataclass(frozen=True)
class StragglerVerdict:
    """A slow process, or one that is no longer slow.

    process: its rank.
    host: its name.
    cause: what takes it longer.
    times: its time over the median of the others'; None if theirs is 0.
    seconds: its time beyond the others', each step; None for a device.
    device: number of the slow device among its own; None: the process as a whole.
    is_recovered: it is no longer slow.
    """

    process: int
    host: str
    cause: str
    times: float | None = None
    seconds: float | None = None
    device: int | None = None
    is_recovered: bool = False

    def words(self) -> str:
        """ "process 3 on host a is slow: its data takes 4.1 times the others', 0.8 s a step" """
        whose = f" (its device {self.device})" if self.device is not None else ""
        who = f"process {self.process} on host {self.host}{whose}"
        return f"{who} is as fast as the others again" if self.is_recovered else f"{who} is slow: {self.finding()}"

    def finding(self) -> str:
        """ "its data takes 4.1 times the others', 0.8 s a step more" """
        if self.cause == DEVICE:
            return f"the same program takes it {self.times:.1f} times as long as the others"
        if self.cause == STALLS:
            return f"it stands still for {self.seconds:.2g} s of each step, longer than the others"
        if self.times is None:
            return f"{TAKES[self.cause]} {self.seconds:.2g} s a step, and the others' none"
        return f"{TAKES[self.cause]} {self.times:.1f} times the others', {self.seconds:.2g} s a step more"

    def document(self) -> dict[str, Any]:
        """As a line of metrics.jsonl holds it."""
        return {name: value for name, value in vars(self).items() if value is not None}


# A process, a cause, and a device of it where that is the cause.
Unit = tuple[int, str, int | None]


@dataclass(frozen=True)
class _Seen:
    """One unit in one window.

    share: of a step, that the others wait for it.
    slow: whether that is a straggler.
    """

    slow: bool
    times: float | None
    seconds: float | None
    share: float


class Comparison:
    """Compares the times that processes report, window by window.

    A window is closed when every process has made `every` steps since the last one, and a second has passed. The windows of different
    processes may be some steps apart, since only rates are compared.

    Args:
        every: smallest number of steps in a window.
        ratio: a process is slow if its time exceeds this multiple of the others' median.
        windows: number of slow windows in a row before a process is named.
    """

    def __init__(self, every: int, ratio: float, windows: int):
        self.every, self.ratio, self.windows = every, ratio, windows
        self._before: dict[int, ProcessTimes] = {}
        # Of devices, which are timed less often.
        self._timed: dict[int, ProcessTimes] = {}
        # Windows in a row in which a unit was slow, or was not.
        self._slow: dict[Unit, int] = {}
        self._fine: dict[Unit, int] = {}
        self.named: dict[int, Unit] = {}
        # Seconds of a step in the last window.
        self.step_s: float | None = None

    def __call__(self, times: Mapping[int, ProcessTimes]) -> list[StragglerVerdict]:
        """What is new after these numbers. Every process must be there, in every call."""
        if set(self._before) != set(times):
            self._before = dict(times)
            self._timed = dict(times)
            return []
        pairs = [(current, self._before[p]) for p, current in times.items()]
        if any(now.steps - before.steps < self.every or now.wall - before.wall < LEAST_S for now, before in pairs):
            return []
        seen = self._hosts(times) | self._devices(times)
        self._before = dict(times)
        return self._judge(seen, times)

    def _hosts(self, times: Mapping[int, ProcessTimes]) -> dict[Unit, _Seen]:
        steps = {p: current.steps - self._before[p].steps for p, current in times.items()}
        self.step_s = step_s = statistics.median((current.wall - self._before[p].wall) / steps[p] for p, current in times.items())
        seen: dict[Unit, _Seen] = {}
        for cause in ON_HOST:
            since = {p: (current.seconds[cause] - self._before[p].seconds[cause]) / steps[p] for p, current in times.items()}
            exposed = {p: (current.exposed[cause] - self._before[p].exposed[cause]) / steps[p] for p, current in times.items()}
            spent = _valid_times(since)
            others = median_of_others(spent)
            for p, its in spent.items():
                theirs = others[p]
                above = min(its - theirs, exposed[p]) if math.isfinite(exposed[p]) else 0.0
                slow = its > self.ratio * theirs and above > SHARE * step_s
                seen[p, cause, None] = _Seen(slow, its / theirs if theirs else None, above, above / step_s)
        return seen

    def _devices(self, times: Mapping[int, ProcessTimes]) -> dict[Unit, _Seen]:
        """Nothing, until every process has timed its devices again."""
        if any(current.probes <= self._timed[p].probes for p, current in times.items()):
            return {}
        each: dict[Unit, float] = {}
        for p, current in times.items():
            before = self._timed[p]
            sums = zip(current.devices, before.devices or [0.0] * len(current.devices), strict=True)
            each |= {(p, DEVICE, i): (now - then) / (current.probes - before.probes) for i, (now, then) in enumerate(sums)}
        self._timed = dict(times)
        each = _valid_times(each)
        others = median_of_others(each)
        seen: dict[Unit, _Seen] = {}
        for unit, its in each.items():
            theirs = others[unit]
            if theirs > 0:
                seen[unit] = _Seen(its > self.ratio * theirs, its / theirs, None, its / theirs - 1)
        return seen

    def _judge(self, seen: Mapping[Unit, _Seen], times: Mapping[int, ProcessTimes]) -> list[StragglerVerdict]:
        for unit, comparison in seen.items():
            self._slow[unit] = self._slow.get(unit, 0) + 1 if comparison.slow else 0
            self._fine[unit] = 0 if comparison.slow else self._fine.get(unit, 0) + 1
        new: list[StragglerVerdict] = []
        for p, unit in list(self.named.items()):
            if self._fine[unit] >= self.windows:
                del self.named[p]
                new.append(StragglerVerdict(p, times[p].host, unit[1], device=_of_several(unit, times), is_recovered=True))
        for p in sorted(times):
            # Of several causes, the one for which the others wait longest.
            units = [unit for unit in seen if unit[0] == p and self._slow[unit] >= self.windows]
            slow = [(seen[unit].share, unit, seen[unit]) for unit in units]
            if p in self.named or not slow:
                continue
            _, unit, comparison = max(slow, key=lambda its: its[0])
            self.named[p] = unit
            new.append(StragglerVerdict(p, times[p].host, unit[1], comparison.times, comparison.seconds, _of_several(unit, times)))
        return new


def _valid_times(numbers: Mapping[Any, float]) -> dict[Any, float]:
    """The values that are times. A clock that was set back, or a number that is none, says nothing about its process."""
    return {unit: s for unit, s in numbers.items() if math.isfinite(s) and s >= 0}


def median_of_others(numbers: Mapping[Any, float]) -> dict[Any, float]:
    """For each, the median of all others; of a single one, itself. Sorted once: there may be thousands."""
    ranked = sorted(numbers, key=lambda unit: numbers[unit])
    values, other_count = [numbers[unit] for unit in ranked], len(ranked) - 1
    if not other_count:
        return dict(numbers)

    def without(rank: int, at: int) -> float:
        return values[at if at < rank else at + 1]

    return {unit: (without(i, (other_count - 1) // 2) + without(i, other_count // 2)) / 2 for i, unit in enumerate(ranked)}


def _of_several(unit: Unit, times: Mapping[int, ProcessTimes]) -> int | None:
    return unit[2] if len(times[unit[0]].devices) > 1 else None


# ---------------------------------------------------------------- the report


def stragglers(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The slow processes in a run's metrics: first and last step, process, and cause."""
    rows: list[list[Any]] = []
    for line in lines:
        if "header" in line:
            # Another start: what was slow then is not known to be.
            for row in rows:
                row[1] = row[1] if row[1] is not None else max(row[0], line["step"])
        its = line.get(KEY)
        if not isinstance(its, Mapping):
            continue
        if not its.get("is_recovered"):
            verdict = StragglerVerdict(**its)
            rows.append([line["step"], None, verdict.process, verdict])
            continue
        for row in rows:
            if row[2] == its["process"] and row[1] is None:
                row[1] = line["step"]
    return [
        (f"{first:,} to {last:,}" if last is not None else f"{first:,} to the end", f"{process} on {verdict.host}", verdict.finding())
        for first, last, process, verdict in rows
    ]
