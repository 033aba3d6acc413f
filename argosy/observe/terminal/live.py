"""Shows a run on stderr: a live picture on a terminal, one plain line per logged step anywhere else.

A thread draws the live picture at most four times a second, however fast steps are; calls with numbers only store them. Rich
draws it and is imported when the picture starts. This module knows nothing of training: `observe.terminal.picture` knows how steps
look.

A terminal that hangs up or a pipe whose reader ends costs the display and not the run: nothing here raises OSError.
"""

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from argosy.core.process.streams import Unfailing
from argosy.observe.readable import harmless, one_line
from argosy.observe.terminal.picture import Picture, evaluation_text, header_lines, line_of

REDRAWS_PER_S = 4


class Terminal:
    """Shows a run. A context manager; `close` ends the live picture and leaves its last state on the screen.

    Args:
        stream: stderr by default.
        live: a picture replaced in place, or plain lines; by default, whichever the stream supports.
        x: the x axis of the curve; auto is logarithmic if the last step is at least 50 times the first logged one.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        x: Literal["auto", "linear", "log"] = "auto",
    ):
        self.stream = stream or sys.stderr
        self._output: Any = Unfailing(self.stream)
        self.is_live = can_redraw(self.stream) if live is None else live
        self.picture = Picture(x)
        self._live: Any = None

    # ---------------------------------------------------------------- events of a run

    def say(self, text: str) -> None:
        """Prints a line above the live picture."""
        if self._live is not None:
            self._live.console.print(line_of(harmless(text)))
        else:
            print(harmless(text), file=self._output, flush=True)

    def header(self, facts: Mapping[str, Any]) -> None:
        """Prints what the run is about to do, and starts the live picture."""
        self.picture.steps = int(facts.get("steps") or 0)
        self.picture.tokens_per_step = int(facts.get("tokens_per_step") or 0)
        self.picture.unit = str(facts.get("unit", self.picture.unit))
        for line in header_lines(facts):
            self.say(line)
        if self.is_live:
            self._start()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.picture.step(step, numbers)
        if not self.is_live:
            self.say(self.picture.line())

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.picture.evaluation(step, numbers)
        if not self.is_live:
            self.say(f"{self.picture.place(step)}  {evaluation_text(numbers)}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.picture.sample = step, prompt, text
        if not self.is_live:
            self.say(f"{self.picture.place(step)}  prompt: {one_line(prompt)}  sample: {one_line(text)}")

    # ---------------------------------------------------------------- beginning and end

    def close(self) -> None:
        """Ends the live picture. May be called twice; also called at exit."""
        if self._live is not None:
            live, self._live = self._live, None
            self.picture.is_over = True
            live.stop()
            atexit.unregister(self.close)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._output, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=lambda: self.picture.drawn(console.width, console.height),
            console=console,
            refresh_per_second=REDRAWS_PER_S,
            # Standard output may be data.
            redirect_stdout=False,
            vertical_overflow="crop",
        )
        self._live.start()
        # A run may be killed at any instant and must not leave the terminal without a cursor.
        console.show_cursor(True)
        atexit.register(self.close)


def can_redraw(stream: TextIO) -> bool:
    """Whether a picture can be replaced in place there: a terminal that is not dumb, supports braille, and was not asked to be
    plain (NO_COLOR, no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
