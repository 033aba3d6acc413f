"""Reads the operations of a capture on one device, and divides the time among them.

A CPU runs several operations of a program at a time, and loops contain operations. So each instant is divided equally among the running
operations that contain no other running one. The seconds of all operations then add up to the time in which the device was busy.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from argosy.core.errors import BadInput

# Lines of a device that are not needed: whole steps, whole programs, and asynchronous copies.
SUMMARIES = ("Steps", "XLA Modules", "Framework Ops", "Framework Name Scope", "Source code", "Async XLA Ops", "Launch Stats")


class Span(NamedTuple):
    """One execution of an operation, in nanoseconds."""

    op: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The operations of one device in a capture.

    seconds: the seconds of each operation of the compiled program.
    counts: the number of executions of each operation.
    busy_s: the seconds in which any operation ran.
    span_s: the seconds from the start of the first operation to the end of the last.
    devices: the number of devices in the file, of which only the first is read.
    module: the name of the program that took most of the time.
    others: the seconds of each other program.
    """

    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    busy_s: float
    span_s: float
    devices: int
    module: str
    others: Mapping[str, float] = field(default_factory=dict)


def read_trace(folder: Path) -> Trace:
    """Reads the capture in a log directory of the profiler.

    Raises:
        BadInput: there is no capture, or it has no operations of a device.
    """
    import jax

    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise BadInput(f"no trace in {folder}", hint="a capture has plugins/profile/*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith(("/device:TPU", "/device:GPU"))]
    spans: dict[str, list[Span]] = defaultdict(list)
    if devices:
        for line in devices[0].lines:
            if line.name not in SUMMARIES:
                for name, span in _device_spans(line.events):
                    spans[name].append(span)
    else:
        for plane in planes:
            if plane.name == "/host:CPU":
                for name, span in _cpu_spans([list(line.events) for line in plane.lines]):
                    spans[name].append(span)
    if not spans:
        raise BadInput(f"the trace in {files[-1]} has no operations of a device", hint="the steps must run while it is taken")
    total = {name: sum(span.end - span.start for span in group) for name, group in spans.items()}
    module = max(total, key=lambda name: total[name])
    seconds, counts, busy = shared_seconds(spans[module])
    module_spans = spans[module]
    span_s = (max(span.end for span in module_spans) - min(span.start for span in module_spans)) / 1e9
    others = {name: shared_seconds(group)[2] for name, group in spans.items() if name != module}
    return Trace(seconds, counts, busy, span_s, max(len(devices), 1), module, others)


def shared_seconds(spans: Iterable[Span]) -> tuple[dict[str, float], dict[str, int], float]:
    """Divides the time among operations. Returns the seconds and the number of executions of each operation, and the seconds in which
    any ran.

    An operation, such as a loop, gets no share of the time in which an operation inside it runs.
    """
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    edges: list[tuple[float, int, int]] = []
    for number, span in enumerate(ordered):
        edges += [(span.start, 1, number), (span.end, 0, number)]
    edges.sort()
    parents = _parents(ordered)
    running: dict[int, int] = {}      # the number of contained operations that run, by operation
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    busy, last = 0.0, 0.0
    leaves: set[int] = set()
    for at, begins, number in edges:
        if leaves:
            share = (at - last) / len(leaves) / 1e9
            for leaf in leaves:
                seconds[ordered[leaf].op] += share
            busy += (at - last) / 1e9
        last, parent = at, parents[number]
        if begins:
            counts[ordered[number].op] += 1
            running[number] = 0
            leaves.add(number)
            if parent in running:
                running[parent] += 1
                leaves.discard(parent)
            continue
        leaves.discard(number)
        running.pop(number, None)
        if parent in running:
            running[parent] -= 1
            if running[parent] == 0:
                leaves.add(parent)
    return dict(seconds), dict(counts), busy


def _parents(ordered: list[Span]) -> list[int]:
    """Returns, for each span, the index of the smallest loop or call that contains it; -1 if there is none. Other operations contain
    nothing: two products that overlap run at the same time."""
    out: list[int] = []
    open_: list[int] = []
    for number, span in enumerate(ordered):
        open_ = [i for i in open_ if ordered[i].end > span.start]
        inside = [i for i in open_ if ordered[i].end >= span.end and is_container(ordered[i].op) and i != number]
        out.append(inside[-1] if inside else -1)
        open_.append(number)
    return out


def is_container(op: str) -> bool:
    """Whether an operation (a loop, a call, a branch) contains others."""
    return op.partition(".")[0] in ("while", "call", "conditional", "async-start")


def _cpu_spans(lines: list[list[Any]]) -> list[tuple[str, Span]]:
    """Returns the spans of a CPU, whose events have the names of operations. Work that continues in other threads ends with an event
    `end: ...`."""
    ends: dict[int, float] = {}
    begins: list[tuple[str, str, int | None, float, float]] = []
    for events in lines:
        for event in events:
            if event.name.startswith("end: "):
                if (token := dict(event.stats).get("_c")) is not None:
                    ends[int(token)] = event.start_ns + event.duration_ns
                continue
            if event.duration_ns <= 0 or event.name.startswith("ThreadpoolListener"):
                continue
            stats = dict(event.stats)
            if (op := stats.get("hlo_op")) is not None:
                token = stats.get("_p")
                end = event.start_ns + event.duration_ns
                begins.append((str(stats.get("hlo_module")), str(op), token, event.start_ns, end))
    return [
        (module, Span(op, start, max(end, ends.get(int(token), end) if token is not None else end)))
        for module, op, token, start, end in begins
    ]


def _device_spans(events: Iterable[Any]) -> Iterable[tuple[str, Span]]:
    """Yields the spans of an accelerator. Its events are kernels or operations, and `hlo_op` or the name of an event is the operation
    of the program."""
    for event in events:
        if event.duration_ns <= 0:
            continue
        stats = dict(event.stats)
        op = str(stats.get("hlo_op") or event.name.lstrip("%").split(" ")[0])
        yield str(stats.get("hlo_module") or "program"), Span(op, event.start_ns, event.start_ns + event.duration_ns)
