"""Parses JSON whose texts can be encoded as UTF-8. Half of a surrogate pair (`\\ud800`) is valid JSON, but is no character, so neither
tokenizers nor files accept it."""

import json
import re
from typing import Any

HALF = re.compile("[\ud800-\udfff]")
# An escaped half of a surrogate pair. Its other half may follow.
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: the text is no JSON, or a text in it holds half of a surrogate pair.
        RecursionError: the value is nested too deeply.
    """
    value = json.loads(text)
    # Quick checks of the text make the slow check of the value rare.
    suspicious = ("\\u" in text and ESCAPED.search(text)) or (not text.isascii() and HALF.search(text))
    if suspicious and (half := HALF.search(json.dumps(value, ensure_ascii=False))):
        raise ValueError(f"\\u{ord(half[0]):04x} is half of a surrogate pair, and no character")
    return value
