"""Counts with their nouns."""

import ast
import re
from pathlib import Path

import pytest

import argosy
from argosy.core.counts import plural

# Nouns of which a user may well have one. Tokens of a context, bytes of a file and other large counts are not among them.
NOUNS = ("step", "device", "shot", "session", "window", "weight", "prompt", "update", "rollout", "core", "turn")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, "step"), "1 step"),
        ((0, "step"), "0 steps"),
        ((12345, "row"), "12,345 rows"),
        ((1, "tensor", "is", "are"), "1 tensor is"),
        ((2, "tensor", "is", "are"), "2 tensors are"),
    ],
)
def test_a_noun_follows_its_count(arguments: tuple, words: str):
    assert plural(*arguments) == words


def mark(part: ast.expr) -> str:
    """NUL for a value that may be a count; a number with decimals is none."""
    spec = part.format_spec if isinstance(part, ast.FormattedValue) else None
    return "" if spec is not None and ast.unparse(spec) != "f','" else "\x00"


def test_words_of_a_run_count_with_it():
    """In what jobs, the command line and reports say, no number of these stands before a plural that does not ask for it."""
    wrong = re.compile(rf"\x00 ({'|'.join(NOUNS)})s\b")
    mistakes = []
    for room in ("jobs", "cli", "observe"):
        for path in sorted((Path(argosy.__file__).parent / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else mark(part) for part in node.values)
                    mistakes += [f"{path.name}:{node.lineno}: {match[0]}" for match in wrong.finditer(text)]
    assert mistakes == []
