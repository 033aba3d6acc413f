"""Grades solutions to questions of mathematics: extracts the final answer and compares it with the right one.

    grade("... so the sum is $\\boxed{\\frac{14}{3}}$.", "14/3")            # True

`final_answer` finds the answer. Tuples, intervals, sets and matrices are compared part by part, numbers and expressions by value
(`rl.expressions`), and equations up to a factor. All other answers are compared as text without regard to case.

Graders differ in some conventions. Here

- 10% is 10 and also 0.1, as in Hendrycks' MATH (arXiv:2103.03874) and math-verify.
- A list has an order, as in MATH; a set in {} has none.
- 1,000 is a thousand and 1,5 is a list, since a comma is no decimal point.
- 2\\frac13 and 2 1/3 are seven thirds.
"""

import re

from argosy.rl.expressions import NoExpression, equivalent, nearly_equal, values
from argosy.rl.rewards.final_answer import final_answer
from argosy.rl.rewards.thoughts import without_thoughts

TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
PERCENT = re.compile(r"\s*(?:\\%|%|\b(?:percent(?:age)?|pct)\b)\s*$")
OPEN, CLOSE = "([{", ")]}"


def reference_answer(answer: object) -> str:
    """Extracts the right answer from an entry of the column `answer`: a number, an answer, or a solution whose answer is in a box or
    after ####."""
    text = str(answer)
    if "\\boxed" in text or "\\fbox" in text or "####" in text:
        return final_answer(text) or text
    return text


def grade(completion: str, answer: object, *, cut: bool = False, strict: bool = False, thinking: bool = False) -> bool:
    """Whether the text after a completion's thoughts ends with the right answer.

    Args:
        answer: the right answer, or a solution that ends with it.
        cut: whether the token limit ended the completion. Only a finished answer then counts.
        strict: whether only an answer in a box or after #### counts.
        thinking: whether the prompt has opened a thought.
    """
    text = without_thoughts(completion, thinking)
    final = None if text is None else final_answer(text, cut=cut, strict=strict)
    return final is not None and equal(final, reference_answer(answer))


def equal(a: str, b: str) -> bool:
    """Whether two answers are the same."""
    a, b = normalize_math(a), normalize_math(b)
    if _squeezed(a) == _squeezed(b):
        return bool(a)
    a, percent_a = _without_percent(a)
    b, percent_b = _without_percent(b)
    if percent_a != percent_b and _by_value(f"({a})/100" if percent_a else a, f"({b})/100" if percent_b else b):
        return True
    return _parts_equal(a, b) or _by_value(_without_units(a), _without_units(b))


def normalize_math(text: str) -> str:
    """Removes notation that does not change the meaning of an answer: dollars, styles and spaces of LaTeX, degrees, separators of
    thousands."""
    text = text.strip().strip("$").strip().rstrip(".").strip()
    text = re.sub(r"^\\\(|\\\)$|^\\\[|\\\]$", "", text)
    text = re.sub(r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|limits)(?![A-Za-z])\.?", "", text)
    text = re.sub(r"\\[,;:> ]|~|\\quad|\\qquad", " ", text.replace("\\!", ""))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", "", text)
    text = re.sub(r"\\\$|[$€£]", "", text)
    text = text.replace("−", "-").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = re.sub(r"\s*\{\s*,\s*\}\s*", ",", text)
    text = re.sub(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,])", lambda m: m[1] + m[2].replace(",", ""), text)
    text = re.sub(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d,])", lambda m: m[1] + m[2].replace(" ", ""), text)
    text = re.sub(r"(?<![\d./)])(\d+)[ \t]+(\d+)\s*/\s*(\d+)(?![\d./])", _mixed, text)
    text = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|(?<=[\d\s)}])\s+(?:and|or)\s+(?=[-\d\\(])", ",", text)
    return _prefixed(_unworded(text)).strip()


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = map(int, match.groups())
    return f"({whole}+{above}/{below})" if above < below else match[0]


def _unworded(text: str) -> str:
    """Resolves words in LaTeX (`\\text{...}`). Words that stand alone are the answer; words after something else are a unit, which is
    removed."""
    if alone := re.fullmatch(rf"\s*{TEXT}\s*", text):
        word = alone[1].strip()
        return word[1:-1] if re.fullmatch(r"\(\w\)", word) else word
    without = re.sub(rf"{TEXT}(?:\s*\^\s*\{{?\d\}}?)?", " ", text)
    return without if without.strip() else re.sub(TEXT, r"\1", text)


def _prefixed(text: str) -> str:
    """Removes `x =` from the start of an answer."""
    match = re.match(r"\s*(?:\\?[A-Za-z]\w?|[a-zA-Z]\([a-z]\)|\\[a-z]+)\s*(?:=|\\in(?![a-z]))\s*(?=\S)", text)
    return text[match.end() :] if match and text.count("=") <= 1 else text


def _without_percent(text: str) -> tuple[str, bool]:
    match = PERCENT.search(text)
    return (text[: match.start()].strip(), True) if match and match.start() else (text, False)


def _without_units(text: str) -> str:
    """Removes words of three letters or more after a number."""
    match = re.fullmatch(r"(.*\d\)?)\s+(?:[A-Za-z]{3,}|per|of)(?:\s+[A-Za-z]+)*\s*", text)
    return match[1] if match else text


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()


def _parts_equal(a: str, b: str) -> bool:
    """Whether two tuples, intervals, sets, lists, unions or matrices have equal parts."""
    for separator in (r"\\cup", ","):
        (opened, xs, closed), (other, ys, shut) = _parts(a, separator), _parts(b, separator)
        if len(xs) != len(ys) or (opened, closed) != (other, shut):
            continue
        if len(xs) > 1 or opened == "\\{":
            return _matched(xs, ys) if opened == "\\{" else all(map(equal, xs, ys))
    rows, others = _matrix(a), _matrix(b)
    if rows and others and [len(row) for row in rows] == [len(row) for row in others]:
        return all(equal(x, y) for row, other in zip(rows, others) for x, y in zip(row, other))
    return False


def _matched(xs: list[str], ys: list[str]) -> bool:
    """Whether two sets are equal, in any order."""
    remaining = list(ys)
    for x in xs:
        index = next((i for i, y in enumerate(remaining) if equal(x, y)), None)
        if index is None:
            return False
        del remaining[index]
    return not remaining


def _parts(text: str, separator: str) -> tuple[str, list[str], str]:
    """Splits a text at separators outside of inner brackets. Returns the opening bracket around the text, the parts, and the closing
    bracket; brackets are empty texts where there are none."""
    plain = text.strip()
    opened = closed = ""
    if separator == "," and plain.startswith("\\{") and plain.endswith("\\}"):
        opened, plain, closed = "\\{", plain[2:-2], "\\}"
    elif separator == "," and plain[:1] in ("(", "[") and plain[-1:] in (")", "]") and _encloses(plain):
        opened, plain, closed = plain[0], plain[1:-1], plain[-1]
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"{separator}|[(\[{{)\]}}]", plain):
        if match[0] in OPEN:
            depth += 1
        elif match[0] in CLOSE:
            depth -= 1
        elif depth == 0:
            parts.append(plain[start : match.start()].strip())
            start = match.end()
    parts = [*parts, plain[start:].strip()]
    # Brackets around one expression only group it.
    return (opened, parts, closed) if len(parts) > 1 or opened == "\\{" else ("", [text.strip()], "")


def _encloses(text: str) -> bool:
    """Whether the last character closes the bracket that the first character opens. The kinds of the two may differ."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in OPEN) - (letter in CLOSE)
        if depth == 0:
            return i == len(text) - 1
    return False


def _matrix(text: str) -> list[list[str]]:
    match = re.fullmatch(r"\s*\\begin\{([pbvB]?matrix)\}(.*)\\end\{\1\}\s*", text, re.DOTALL)
    if not match:
        return []
    rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def _by_value(a: str, b: str) -> bool:
    """Whether two numbers, expressions or equations have the same value."""
    try:
        if a.count("=") == b.count("=") == 1:
            return _same_equation(a, b)
        return equivalent(a, b)
    except NoExpression:
        return False


def _same_equation(a: str, b: str) -> bool:
    """Whether two equations are equivalent: left side minus right side is the same function up to a factor."""
    first, second = (values(f"({left})-({right})") for left, right in (a.split("="), b.split("=")))
    ratios = [complex(x) / complex(y) for x, y in zip(first, second) if y]
    return len(ratios) == len(first) and ratios[0] != 0 and all(nearly_equal(ratio, ratios[0]) for ratio in ratios)
