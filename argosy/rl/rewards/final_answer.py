r"""Extracts the final answer of a solution to a question of mathematics.

The answer is the first of these that exists:

- the content of the last \boxed{} or \fbox{}
- the text after the last ####, as in GSM8K (arXiv:2110.14168)
- the content of the last <answer> </answer>
- the text after the last `answer is`
- the last number or expression (`last_value`)

In strict mode only a box or the text after #### counts. If the token limit cut the text, only a finished answer counts, because a 4 at
the end may be the beginning of 42.
"""

import re

from argosy.rl.rewards.last_value import last_value

FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")


def final_answer(text: str, *, cut: bool = False, strict: bool = False) -> str | None:
    """Finds the final answer of a text. Returns None if there is none, for instance because the text breaks off inside a box.

    Args:
        cut: whether the token limit ended the text.
        strict: whether only a box or the text after #### is an answer.
    """
    if (at := max(text.rfind("\\boxed"), text.rfind("\\fbox"))) >= 0:
        return _boxed(text[at:])
    if "####" in text:
        line, newline, _ = text.rpartition("####")[2].lstrip().partition("\n")
        return None if cut and not newline else line.strip()
    if strict:
        return None
    if matches := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        inner = final_answer(matches[-1]) if "\\boxed" in matches[-1] else matches[-1].strip()
        return inner or None
    if matches := list(re.finditer(r"answer is:?\s*(.+)", text, re.IGNORECASE)):
        return _sentence(matches[-1][1], cut=cut and "\n" not in text[matches[-1].end() :])
    return None if cut else last_value(text)


def _boxed(text: str) -> str | None:
    """Returns the content of the box at the start of this text: what the braces enclose, or the word after `\\boxed `."""
    start = re.match(r"\\[a-z]+\s*", text)
    assert start
    rest = text[start.end() :]
    if not rest.startswith("{"):
        return (rest.split("$")[0].split() or [None])[0]
    depth = 0
    for i, letter in enumerate(rest):
        if letter in "{}" and rest[i - 1 : i] != "\\":
            depth += 1 if letter == "{" else -1
        if depth == 0:
            return rest[1:i].strip()
    return None


def _sentence(text: str, cut: bool) -> str | None:
    """Returns the formula at the start of a text, or else the words up to the end of the sentence.

    Args:
        cut: whether the token limit ended the text. Only a whole sentence then counts.
    """
    if formula := FORMULA.match(text.lstrip("* ")):
        return next(filter(None, formula.groups())).strip()
    if cut and not re.search(r"\.\s", text):
        return None
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0].strip().strip("*").strip() or None
