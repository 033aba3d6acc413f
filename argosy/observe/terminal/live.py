"""Displays a run on stderr: as a live picture on a terminal, as one line per logged step elsewhere.

A thread draws the live picture at most four times a second, and calls with new numbers only store them. Rich draws the picture and is
imported when it starts. This module knows nothing of training: `observe.terminal.picture` formats steps.

If the terminal hangs up or the reader of a pipe ends, the display ends and the run goes on: nothing here raises OSError.
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
    """Displays a run. This is a context manager. `close` ends the live picture and leaves its last state on the screen.

    Args:
        stream: the stream to write to. The default is stderr.
        live: whether a picture is redrawn in place, and not plain lines printed. The default is what the stream supports.
        x: the kind of the curve's x axis. auto is logarithmic if the last step is at least 50 times the first logged one.
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
        """Prints the header of the run and starts the live picture."""
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
        """Ends the live picture. It may be called twice, and is also called at exit."""
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
    """Whether a picture can be redrawn in place: the stream is a terminal that is not dumb and supports braille, and NO_COLOR
    (no-color.org) is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
