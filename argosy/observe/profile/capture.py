"""Captures some steps of a run: XLA's trace, the compiled program, and the wall time by an independent clock.

    profile/12/window.json                     first and last step, wall seconds, seconds by cause (data, checkpoint, ...)
    profile/12/process-0.hlo.txt               the optimized program of the step
    profile/12/process-0/plugins/profile/...   what `xprof --logdir=profile/12/process-0` opens

To request a capture of a running job, write `profile/request.json`. The run replies with the steps that all its processes will capture.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.observe.goodput import Clock

FOLDER, REQUEST, WINDOW = "profile", "request.json", "window.json"


@dataclass(frozen=True)
class Window:
    """The facts of a capture.

    first, last: the first and the last captured step, both inclusive.
    wall_s: the seconds from before the data of the first step to the end of the last, by the clock of the process.
    seconds: the seconds of this time by cause; `other` is time outside all causes.
    devices, kind: the number of devices of the process, and their kind.
    platform: cpu, gpu or tpu.
    request: the request that asked for the capture; None if the settings did.
    """

    first: int
    last: int
    wall_s: float
    seconds: Mapping[str, float]
    devices: int
    kind: str
    platform: str
    request: str | None = None

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def data_s(self) -> float:
        """The seconds in which the loop waited for data."""
        return self.seconds.get("data", 0.0)


class Capture:
    """A capture of this process.

    folder: the folder of the capture.
    process: the rank of this process.
    """

    def __init__(self, folder: Path, process: int, clock: Clock):
        self.folder, self.process, self.clock = folder, process, clock
        self._begun = 0.0
        self._before: dict[str, float] = {}

    @property
    def trace(self) -> Path:
        return self.folder / f"process-{self.process}"

    @property
    def program(self) -> Path:
        return self.folder / f"process-{self.process}.hlo.txt"

    def start(self) -> None:
        import jax

        self.folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        # Python calls are most of the events on the host, and no table needs them.
        options.python_tracer_level = 0
        options.host_tracer_level = 2
        jax.profiler.start_trace(str(self.trace), profiler_options=options)
        self._before, self._begun = self.clock.shares(), time.perf_counter()

    def stop(self, first: int, last: int, request: str | None = None) -> Window:
        """Ends the capture and writes it. The caller must have waited for the last step, so that the devices are idle."""
        import jax

        wall, now = time.perf_counter() - self._begun, self.clock.shares()
        jax.profiler.stop_trace()
        spent = {cause: now[cause] - self._before.get(cause, 0.0) for cause in now}
        # The time of this hook itself, which runs between the two times.
        spent.pop(FOLDER, None)
        devices = jax.local_devices()
        spent = {cause: s for cause, s in spent.items() if s > 0}
        window = Window(first, last, wall, spent, len(devices), devices[0].device_kind, devices[0].platform, request)
        write_json(self.folder / (WINDOW if self.process == 0 else f"process-{self.process}.json"), asdict(window))
        return window


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that readers see completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


def read_window(folder: Path) -> Window:
    """Reads the facts of a capture.

    Raises:
        BadInput: the folder holds no complete capture.
    """
    try:
        return Window(**json.loads((folder / WINDOW).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise BadInput(f"no complete capture in {folder}", hint="`argosy profile RUN steps=3` takes one of a running job") from None


def captures(run: Path) -> list[Path]:
    """Returns the folders of the complete captures of a run, the oldest first."""
    folders = [path.parent for path in (run / FOLDER).glob(f"*/{WINDOW}") if path.parent.name.isdecimal()]
    return sorted(folders, key=lambda path: int(path.name))


class Requests:
    """Looks once a second for requests for captures of a run.

    Process 0 replies to a request with the steps to capture. They are far enough ahead that every process has seen the reply before.
    """

    def __init__(self, run: Path, process: int, processes: int, now: Callable[[], float] = time.monotonic):
        self.path, self.process, self.processes, self.now = run / FOLDER / REQUEST, process, processes, now
        self._looked = now()
        self._last = (now(), 0)
        self._step_s = 1.0

    def window(self, step: int) -> tuple[int, int, str] | None:
        """Returns the first and the last step to capture, and the request; None if there is no request. `step`: the number of updates
        made so far."""
        now = self.now()
        if now - self._looked < 1.0:
            return None
        last_time, before = self._last
        self._step_s = (now - last_time) / max(step - before, 1)
        self._looked, self._last = now, (now, step)
        try:
            request = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if "first" not in request and self.process == 0:
            # Other processes look once a second, and shared file systems show a file some seconds later.
            ahead = 1 if self.processes == 1 else 1 + int(10.0 / max(self._step_s, 1e-3))
            request |= {"first": step + ahead, "last": step + ahead + int(request["steps"]) - 1}
            write_json(self.path, request)
        if "first" not in request or step >= request["first"]:
            return None
        return int(request["first"]), int(request["last"]), str(request["id"])

    def done(self) -> None:
        if self.process == 0:
            self.path.unlink(missing_ok=True)
