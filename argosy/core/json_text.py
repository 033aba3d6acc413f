"""JSON as text that can be written again: half of a surrogate pair (`\\ud800`) is valid JSON and no character, so no tokenizer and no
file takes it."""

import json
import re
from typing import Any

HALF = re.compile("[\ud800-\udfff]")
# An escaped half of a pair, which may stand beside its other half.
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value of a text of JSON.

    Raises:
        ValueError: it is no JSON, or a text in it holds half of a surrogate pair.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text)
    # Quick looks at the text spare nearly every value the walk.
    suspicious = ("\\u" in text and ESCAPED.search(text)) or (not text.isascii() and HALF.search(text))
    if suspicious and (half := HALF.search(json.dumps(value, ensure_ascii=False))):
        raise ValueError(f"\\u{ord(half[0]):04x} is half of a surrogate pair, and no character")
    return value
