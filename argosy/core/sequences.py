"""What two sequences have in common."""

from collections.abc import Sequence
from typing import Any


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences begin with in common: characters of texts, bytes, tokens, messages."""
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
