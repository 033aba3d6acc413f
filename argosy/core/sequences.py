"""Compares sequences."""

from collections.abc import Sequence
from typing import Any


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences of characters, bytes, tokens or messages."""
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
