"""Captures steps with the profiler: those that the settings name, and those that `argosy profile RUN` requests while the run is
training.

A capture begins between two steps, after all other hooks, and ends between two steps, before all other hooks. So it contains whole
steps with their data and nothing else. A run that captures nothing reads the clock once per step, and looks for a request once per
second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.observe.goodput import Clock
from argosy.observe.profile.capture import FOLDER, Capture, Requests
from argosy.run.settings.profile import ProfileSettings

PROGRAM = "program.hlo.txt"


class Profiling:
    """The captures of one process of a run.

    run: the run directory; None if it is not on this machine, and nothing is captured.
    program: the compiled step.
    """

    def __init__(
        self, settings: ProfileSettings, run: Path | None, clock: Clock, program: Any, say: Callable[[str], None], *,
        process: int = 0, processes: int = 1,
    ):  # fmt: skip
        self.run, self.clock, self.program, self.say, self.process = run, clock, program, say, process
        self.window = settings.window
        self.request: str | None = None
        self.requests = Requests(run, process, processes) if run is not None else None
        self.capture: Capture | None = None
        if run is None and (self.window or settings.program):
            say("profile: a capture needs a run directory on this machine; none is taken")
        if run is not None and settings.program and process == 0:
            write_program(program, run / PROGRAM)

    def begins(self, step: int) -> bool:
        """Whether a capture begins after `step` updates."""
        if self.run is None or self.capture is not None:
            return False
        if self.requests is not None and (request := self.requests.window(step)) is not None:
            *window, self.request = request
            self.window = (window[0], window[1])
        return self.window is not None and step == self.window[0] - 1

    def ends(self, step: int, last: bool) -> bool:
        return self.capture is not None and self.window is not None and (last or step >= self.window[1])

    def begin(self, now: Any) -> None:
        import jax

        assert self.run is not None
        assert self.window is not None
        jax.block_until_ready(now.state)
        self.capture = Capture(self.run / FOLDER / str(self.window[0]), self.process, self.clock)
        self.capture.start()

    def end(self, now: Any) -> None:
        import jax

        assert self.capture is not None
        assert self.window is not None
        jax.block_until_ready(now.state)
        if self.process == 0:
            # Before the window is complete for who waits for it.
            write_program(self.program, self.capture.program)
        window = self.capture.stop(self.window[0], now.step, self.request)
        if self.process == 0:
            self.say(f"captured {plural(window.steps, 'step')}, {window.first} to {window.last}: argosy profile {self.run}")
        if self.request is not None and self.requests is not None:
            self.requests.done()
        self.capture = self.window = self.request = None

    def hooks(self, patiently: Callable[[Any], Any]) -> tuple["Profiled", "Profiled"]:
        """Returns two hooks. The first ends captures and must run before all other hooks. The second begins captures and must run after
        them."""
        end = Profiled(self.ends, patiently(self.end))
        return end, Profiled(lambda step, last: not last and self.begins(step), patiently(self.begin))


@dataclass(frozen=True)
class Profiled:
    """A hook that begins or ends a capture."""

    due: Callable[[int, bool], bool]
    do: Callable[[Any], None]
    name: str = FOLDER

    def __call__(self, now: Any) -> None:
        self.do(now)


def write_program(program: Any, path: Path) -> None:
    """Writes the text of a compiled step to a file, if the step is a single program."""
    text = getattr(program, "as_text", None)
    if text is not None and (program_text := text()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program_text, encoding="utf-8")
