"""How verbs print: the answer on stdout, as text or one JSON document; everything else on stderr, readable without color."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from argosy.cli.verbs import VERBS
from argosy.core.command import command_name
from argosy.core.errors import ArgosyError
from argosy.core.process.streams import Unfailing, is_gone, silence


def answer(text: str, document: Any, as_json: bool) -> None:
    """Prints a verb's answer: `document` as JSON where --json was given, else `text`.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    if as_json:
        plain = not is_utf8(sys.stdout)  # escapes lose nothing, question marks do
        print(json.dumps(_finite(document), indent=2, ensure_ascii=plain, allow_nan=False))
    else:
        print(text.rstrip("\n"))


def conclude(text: str, document: Any, as_json: bool) -> None:
    """`answer` for a verb whose result is on disk: the exit code says how the work ended, though nobody reads the answer."""
    try:
        answer(text, document, as_json)
        sys.stdout.flush()
    except OSError as error:
        # A full disk under `> file` is a failure.
        if not is_gone(error):
            raise
        silence(sys.stdout)


def say(text: str) -> None:
    """Prints a message for the user, if anybody still reads stderr."""
    with suppress(OSError):
        print(as_typed(text), file=sys.stderr, flush=True)


class Doing:
    """Prints on stderr what a command is doing while it prints nothing else: loading jax, compiling.

    On a terminal each line replaces the previous one, and `done` removes it; elsewhere lines are printed. A context manager. A
    terminal or pipe that is gone costs these lines and not the command.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream: Any = Unfailing(stream or sys.stderr)
        self.is_live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.is_shown = False

    def __call__(self, activity: str) -> None:
        print(
            f"\r\033[K{activity} ..." if self.is_live else f"{activity} ...", end="" if self.is_live else "\n", file=self.stream
        )
        self.stream.flush()
        self.is_shown = self.is_live

    def done(self) -> None:
        """Removes the line."""
        if self.is_shown:
            self.is_shown = False
            print("\r\033[K", end="", file=self.stream, flush=True)

    def __enter__(self) -> "Doing":
        return self

    def __exit__(self, *_: object) -> None:
        self.done()


def fail(error: ArgosyError) -> None:
    """Prints an error and its hint."""
    text = str(error)
    if can_color(sys.stderr):
        text = text.replace("error: ", "\033[1;31merror:\033[0m ").replace("\nhint: ", "\n\033[36mhint:\033[0m ")
    say(text)


def as_typed(text: str) -> str:
    """The text, with each `argosy VERB` in it written as this user types it."""
    return re.sub(rf"(?<![\w./-])argosy (?=({'|'.join(VERBS)})\b)", lambda _: f"{command_name()} ", text)


def can_color(stream: TextIO) -> bool:
    """Whether color codes are wanted there: a terminal, NO_COLOR unset or empty (no-color.org), not a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_utf8(stream: TextIO) -> bool:
    """Whether every letter can be written there."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") in ("utf8", "")


def forgive(*streams: TextIO) -> None:
    """Lets streams that are not UTF-8 (a Windows code page) write a question mark for what they lack, not a traceback."""
    for stream in streams:
        if not is_utf8(stream) and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def _finite(value: Any) -> Any:
    """The document with infinities and NaN as text, because JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
