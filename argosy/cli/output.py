"""How verbs speak: the answer on stdout, as text or as one JSON document; all else on stderr, readable uncolored."""

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from argosy.core.errors import ArgosyError


def answer(text: str, document: Any, as_json: bool) -> None:
    """Prints a verb's answer: `document` as JSON where --json was given, else `text`."""
    if as_json:
        print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(text.rstrip("\n"))


def say(text: str) -> None:
    """Words for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def fail(error: ArgosyError) -> None:
    """Tells an error and its way out."""
    text = str(error)
    if can_color(sys.stderr):
        text = text.replace("error: ", "\033[1;31merror:\033[0m ").replace("\nhint: ", "\n\033[36mhint:\033[0m ")
    say(text)


def can_color(stream: TextIO) -> bool:
    """Whether color codes are wanted there: a terminal, NO_COLOR unset or empty (no-color.org), not a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _finite(value: Any) -> Any:
    """The document with infinities and NaN as text, because JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
