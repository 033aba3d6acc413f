"""Extracts the answer from a generated text, and compares it with the right answer.

    strict     the text is the answer, or has the answer in the form that the task asks for (`#### 18` of GSM8K)
    flexible   the answer is the first, or the last, thing in the text that looks like an answer

Answers are compared without case, commas, dollar signs, quotes and a final period. Two numbers are compared by value.
"""

import re
from collections.abc import Mapping
from typing import Any

from argosy.evals.tasks import Task


def is_right(task: Task, row: Mapping[str, Any], text: str) -> tuple[bool, bool]:
    """Whether a generated text has the right answer to a row: (strict, flexible)."""
    gold = expected_answer(task, row)
    strict = find_match(task.strict, text, last=task.last) if task.strict else text
    return is_same_answer(strict, gold), is_same_answer(last_number(task, row, text), gold)


def expected_answer(task: Task, row: Mapping[str, Any]) -> str:
    """The right answer of a row."""
    text = row[task.answer].strip()
    return (find_match(task.strict, text, last=True) or text) if task.strict else text


def last_number(task: Task, row: Mapping[str, Any], text: str) -> str | None:
    """The first or the last thing in a text that looks like an answer (`task.flexible`); None: there is none. The text itself, if the
    task does not say what an answer looks like."""
    if task.flexible == "words":
        return sorted_words(row[_QUESTION], text)
    return find_match(task.flexible, text, last=task.last) if task.flexible else text


_QUESTION = "input"


def sorted_words(question: str, text: str) -> str:
    """The words of the list in the question, in the order of their last occurrences in the text."""
    words = question.rpartition("List:")[2].split()
    matches = re.findall("|".join(rf"(?<!\w){re.escape(w)}(?!\w)" for w in sorted(words, key=len, reverse=True)), text)
    return " ".join(reversed(dict.fromkeys(reversed(matches))))


def find_match(pattern: str, text: str, *, last: bool) -> str | None:
    """The first or the last match in a text, or its group if the pattern has one; None: there is no match."""
    matches = re.findall(pattern, text)
    return matches[-1 if last else 0] if matches else None


def is_same_answer(answer: str | None, gold: str) -> bool:
    """Whether an answer equals the right one, after normalization or as a number."""
    if answer is None:
        return False
    a, b = normalize_answer(answer), normalize_answer(gold)
    return a == b or (_number(a) is not None and _number(a) == _number(b))


def normalize_answer(text: str) -> str:
    """Removes commas, dollar signs, quotes, backslashes, line breaks and a final period, and lower-cases the text."""
    return re.sub(r'[,$"\\\n]', "", text).strip().rstrip(".").strip().lower()


def _number(text: str) -> float | None:
    try:
        return float(text) if re.fullmatch(r"-?\d+(\.\d*)?", text) else None
    except OverflowError:
        return None
