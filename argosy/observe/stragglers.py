"""Finds the process of a run that the others wait for.

In synchronous training a step takes equally long in all processes, because fast processes wait for the slowest one inside the step. So
the times that each process spends by itself are compared:

    data       seconds of waiting for the next batch
    host       seconds of other Python code: callbacks, logging, garbage collection
    stalls     seconds in which the process did not run, because it was stopped or had no processor
    device     seconds of a program without collectives, the same on every device

Host time counts only if the devices were idle when it ended (`exposed`), because work while devices compute delays nobody. This module
knows no processes and no devices, only the numbers that processes report.
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
# The least seconds of a window.
LEAST_S = 1.0
# A host is slow only if the others wait for it for at least this share of a step.
SHARE = 0.1
# The key of metrics lines about a process that is slow, or no longer slow.
KEY = "straggler"

TAKES = {DATA: "its data takes", HOST: "its Python between steps takes"}


@dataclass(frozen=True)
class ProcessTimes:
    """The times that a process reports, summed since its start.

    steps: the number of steps.
    wall: the wall time in seconds.
    seconds: the host seconds by cause.
    exposed: the part of `seconds` in which devices waited.
    host: the name of the host.
    probes: the number of timings of the devices.
    devices: the total seconds of these timings, for each device of the process.
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

    process: the rank of the process.
    host: the name of its host.
    cause: the cause that takes longer: data, host, stalls or device.
    times: the time of the process over the median of the others, None if that median is 0.
    seconds: the seconds per step beyond that median, None for a device.
    device: the index of the slow device among those of the process, None for the process as a whole.
    is_recovered: whether the process is no longer slow.
    """

    process: int
    host: str
    cause: str
    times: float | None = None
    seconds: float | None = None
    device: int | None = None
    is_recovered: bool = False

    def words(self) -> str:
        """Returns a sentence such as "process 3 on host a is slow: its data takes 4.1 times the others', 0.8 s a step more"."""
        whose = f" (its device {self.device})" if self.device is not None else ""
        who = f"process {self.process} on host {self.host}{whose}"
        return f"{who} is as fast as the others again" if self.is_recovered else f"{who} is slow: {self.finding()}"

    def finding(self) -> str:
        """Returns a phrase such as "its data takes 4.1 times the others', 0.8 s a step more"."""
        if self.cause == DEVICE:
            return f"the same program takes it {self.times:.1f} times as long as the others"
        if self.cause == STALLS:
            return f"it stands still for {self.seconds:.2g} s of each step, longer than the others"
        if self.times is None:
            return f"{TAKES[self.cause]} {self.seconds:.2g} s a step, and the others' none"
        return f"{TAKES[self.cause]} {self.times:.1f} times the others', {self.seconds:.2g} s a step more"

    def document(self) -> dict[str, Any]:
        """Returns the JSON object for a line of metrics.jsonl."""
        return {name: value for name, value in vars(self).items() if value is not None}


# (process, cause, device), where the device is None for other causes.
Unit = tuple[int, str, int | None]


@dataclass(frozen=True)
class _Seen:
    """The comparison of one unit in one window.

    slow: whether the unit is a straggler.
    times, seconds: as in `StragglerVerdict`.
    share: the share of a step for which the others wait for the unit.
    """

    slow: bool
    times: float | None
    seconds: float | None
    share: float


class Comparison:
    """Compares the times that processes report, window by window.

    A window ends when every process has made `every` steps since the last one, and a second has passed. The windows of different
    processes may be some steps apart, because only times per step are compared.

    Args:
        every: the least number of steps in a window.
        ratio: a process is slow if its time exceeds this multiple of the median of the others.
        windows: the number of consecutive slow windows after which a process is reported.
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
        """Returns the processes that became slow, or are no longer slow, after these times. Every call needs the times of every
        process."""
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
        """Compares devices. Returns nothing until every process has timed its devices again."""
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
            # Among several causes, the one for which the others wait longest.
            units = [unit for unit in seen if unit[0] == p and self._slow[unit] >= self.windows]
            slow = [(seen[unit].share, unit, seen[unit]) for unit in units]
            if p in self.named or not slow:
                continue
            _, unit, comparison = max(slow, key=lambda its: its[0])
            self.named[p] = unit
            new.append(StragglerVerdict(p, times[p].host, unit[1], comparison.times, comparison.seconds, _of_several(unit, times)))
        return new


def _valid_times(numbers: Mapping[Any, float]) -> dict[Any, float]:
    """Returns the finite values that are not negative. Others, such as those of a clock that was set back, say nothing about a
    process."""
    return {unit: s for unit, s in numbers.items() if math.isfinite(s) and s >= 0}


def median_of_others(numbers: Mapping[Any, float]) -> dict[Any, float]:
    """Returns, for each unit, the median of all other units; for a single unit its own value. The values are sorted only once, because
    there may be thousands."""
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
    """Returns (first and last step, process, cause) for the slow processes in a run's metrics."""
    rows: list[list[Any]] = []
    for line in lines:
        if "header" in line:
            # Another start, for which it is not known whether the same processes are slow.
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
