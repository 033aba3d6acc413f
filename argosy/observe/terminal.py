"""A run on stderr: at a terminal a live picture, replaced in place; anywhere else one plain line a logged step.

The live part is drawn by a thread, four times a second at most however fast steps are; telling it a number stores the
number. It is drawn by Rich, which is imported when a picture begins. Knows nothing of training: it is handed facts, steps
and numbers, and `observe.picture` knows how they look.
"""

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from argosy.observe.picture import Picture, evaluated, headed, line_of
from argosy.observe.readable import harmless, one_line

REDRAWS_PER_S = 4


class Terminal:
    """Shows a run. A context manager; `close` ends the live picture and leaves its last state on the screen.

    Args:
        stream: stderr unless told.
        live: a picture replaced in place, or plain lines; as the stream can unless told.
        x: the axis of the curve; auto: logarithmic where the run is long beside its first logged step.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        x: Literal["auto", "linear", "log"] = "auto",
    ):
        self.stream = stream or sys.stderr
        self.is_live = can_redraw(self.stream) if live is None else live
        self.picture = Picture(x)
        self._live: Any = None

    # ---------------------------------------------------------------- what a run tells

    def say(self, text: str) -> None:
        """Words, above the live part."""
        if self._live is not None:
            self._live.console.print(line_of(harmless(text)))
        else:
            print(harmless(text), file=self.stream, flush=True)

    def plan(self, facts: Mapping[str, Any]) -> None:
        """What is about to be done; the live part begins here."""
        self.picture.steps = int(facts.get("steps") or 0)
        for line in headed(facts):
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
            self.say(f"{self.picture.place(step)}  {evaluated(numbers)}")

    def sample(self, step: int, text: str) -> None:
        self.picture.sample = step, text
        if not self.is_live:
            self.say(f"{self.picture.place(step)}  sample: {one_line(text)}")

    # ---------------------------------------------------------------- beginning and end

    def close(self) -> None:
        """Ends the live part. May be called twice, and is at exit."""
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

        console = Console(file=self.stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=lambda: self.picture.drawn(console.width, console.height),
            console=console,
            refresh_per_second=REDRAWS_PER_S,
            redirect_stdout=False,  # data may be going there
            vertical_overflow="crop",
        )
        self._live.start()
        console.show_cursor(True)  # a run may be killed at any instant, and must not leave a terminal without a cursor
        atexit.register(self.close)


def can_redraw(stream: TextIO) -> bool:
    """Whether a picture can be replaced in place there: a terminal that is not dumb, shows braille, and has not been asked
    to be plain (NO_COLOR, no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
