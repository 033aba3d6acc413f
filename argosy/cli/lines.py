"""Reads lines from a person, with line editing and a history where there is readline, or from a pipe."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.process import signals

MOST = 1000
FENCE = '"""'


def history_file() -> Path | None:
    """The file of the history of `argosy chat`; None if this user has no home directory."""
    if folder := os.environ.get("XDG_STATE_HOME"):
        return Path(folder) / "argosy" / "chat_history"
    with suppress(RuntimeError):
        return Path.home() / ".local" / "state" / "argosy" / "chat_history"
    return None


class Lines:
    """The lines of stdin.

    Args:
        history: a file for the lines of this session and the next ones; None for none. words: completed by the tab key at the
            beginning of a line.
    """

    def __init__(self, history: Path | None = None, words: Sequence[str] = ()):
        self.is_live = sys.stdin is not None and sys.stdin.isatty()
        self.history, self.words = history, list(words)
        self.readline = self._readline() if self.is_live and sys.stdout.isatty() else None

    def __call__(self, prompt: str = "") -> str:
        """The next line, without its line break. The prompt is shown to a person only.

        Raises:
            EOFError: there is none. KeyboardInterrupt: Ctrl-C. SystemExit: another signal. BadInput: stdin is no UTF-8 text.
        """
        if sys.stdin is None:
            raise EOFError
        with signals.raising():
            if self.readline is not None:
                line = input(prompt)
                self._remember()
                return line
            if self.is_live:
                print(prompt, end="", file=sys.stderr, flush=True)
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError:
                raise BadInput("stdin is not UTF-8 text") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def typed(self) -> str:
        """The text of the line that Ctrl-C interrupted; empty without readline."""
        return self.readline.get_line_buffer() if self.readline is not None else ""

    def _readline(self) -> Any:
        try:
            import readline
        except ImportError:  # Windows
            return None
        readline.set_completer_delims(" ")
        readline.set_completer(lambda text, n: [*(word for word in self.words if text and word.startswith(text)), None][n])
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        readline.set_history_length(MOST)
        if self.history is not None:
            with suppress(OSError):
                readline.read_history_file(self.history)
        return readline

    def _remember(self) -> None:
        """Writes the history after each line: a terminal may be closed at any time."""
        if self.history is None or self.readline is None:
            return
        with suppress(OSError):
            self.history.parent.mkdir(parents=True, exist_ok=True)
            # What people say to a model is nobody else's business.
            os.close(os.open(self.history, os.O_WRONLY | os.O_CREAT, 0o600))
            self.readline.write_history_file(self.history)


def several(read: Callable[[str], str], first: str, more: str) -> str:
    """The next text: a line, lines joined by backslashes at their ends, or lines between two fences.

    Args:
        read: (prompt) -> a line.
        first: prompt of the first line.
        more: prompt of the lines after it.

    Raises:
        EOFError: there is no text. An end of input in the middle of several lines ends them.
    """
    line = read(first)
    if not line.startswith(FENCE):
        lines = []
        with suppress(EOFError):
            while line.endswith("\\"):
                lines.append(line.removesuffix("\\"))
                line = ""
                line = read(more)
        return "\n".join([*lines, line])
    lines = [line.removeprefix(FENCE)]
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(read(more))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")
