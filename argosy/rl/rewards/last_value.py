r"""Finds the last number or expression of a prose text. An expression is never divided: in `\frac{1}{2}` the 2 alone is not found.

A text is split into runs of numbers, variables, LaTeX commands, operators and brackets. Words, relations (`=`), dollars and line ends
separate runs. The last run with a number or a command is the value. There is no value if this run breaks off (`= 4 *`, `\frac{1`),
lacks an operand (`3 * apples`), or is arithmetic that is not carried out (`2 + 3`). Otherwise a text could earn a reward by restating
the question.

There is no list of all units. A letter after a number is a unit if it is in `UNIT`, otherwise a variable.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from argosy.rl.expressions import CONSTANTS, FUNCTIONS

_WORDS = r"text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname"
_KINDS = {
    "word": rf"\\(?:{_WORDS})\s*\{{[^{{}}]*\}}",
    "space": r"\\[,;:! ]|~|\\q?quad|\\(?:left|right|[bB]ig[lr]?)(?![A-Za-z])\.?",
    "break": r"\\[()\[\]\\]|\\?\$|\n",
    "percent": r"\\?%",
    "number": r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|\.\d+",
    "unit": r"(?<=\d)[mgshlLVWJNAKCF](?:\^?\{?[23]\}?|[²³])?(?:/[a-z]+)?(?![A-Za-z0-9(^_{])",
    "letters": r"(?<=\d)[abcnkpqrtuvwxyz]{2}(?![A-Za-z])",
    "name": r"[A-Za-z]{2,}\w*(?:['-]\w+)*",
    "command": r"\\[A-Za-z]+|[√π]",
    "letter": r"[A-Za-z]",
    "operator": r"\*\*|[-+*/^_−×÷·]|(?<=\d):(?=\d)",
    "relation": r"[=<>≈≤≥≠]",
    "open": r"[(\[{]|\\\{",
    "close": r"[)\]}]|\\\}",
    "comma": r",",
    "factorial": r"(?<=[\w)}])!(?=[\w+\-*/^)}\]])",
    "blank": r"[^\S\n]+",
    "other": r".",
}
_TOKEN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items()), re.DOTALL)
_TIMES = {r"\times", r"\cdot", r"\div"}
_RELATIONS = {
    *(r"\approx", r"\equiv", r"\implies", r"\Rightarrow", r"\Longrightarrow", r"\rightarrow", r"\to", r"\le", r"\leq", r"\ge"),
    *(r"\geq", r"\ne", r"\neq", r"\lt", r"\gt", r"\therefore", r"\ldots", r"\dots", r"\in", r"\iff"),
}
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"}
_SCIENTIFIC = re.compile(r"-?\d+(?:\.\d+)?\s*(?:\\times|\\cdot|[*×·])\s*10\s*\^\s*\{?\s*-?\d+\s*\}?")
_MIXED = re.compile(r"\d+\s*/\s*\d+")
# Kinds that a factor ends with, and begins with.
_ENDS, _BEGINS = ("number", "letter", "command", "close", "percent", "factorial"), ("number", "letter", "command", "open")


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class _Run(NamedTuple):
    """A run of tokens that may form an expression.

    tokens: the tokens.
    before, behind: the kind of the separator on each side; `line` is the begin or end of a line or of the text.
    """

    tokens: list[_Token]
    before: str
    behind: str


def last_value(text: str) -> str | None:
    """Finds the last number or expression of a text. Returns None if there is none or if it is incomplete."""
    runs = [run for run in _runs(text) if any(token.kind in ("number", "command") for token in run.tokens)]
    return _value(text, runs[-1]) if runs else None


def _tokens(text: str) -> list[_Token]:
    """Splits a text into tokens. The name of a function or constant becomes a command; other names become words."""
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind, token = str(match.lastgroup), match[0]
        if kind == "name":
            function = token in FUNCTIONS and text[match.end() : match.end() + 1] in ("(", "{")
            kind = "command" if function or token in CONSTANTS else "word"
        elif kind == "command" and token in _RELATIONS:
            kind = "relation"
        elif kind == "command" and token in _TIMES:
            kind = "operator"
        elif kind == "letter" and token in "aAI" and not _touches(text, match.start(), match.end()):
            kind = "word"
        kind = {"letters": "letter", "unit": "word", "other": "word"}.get(kind, kind)
        tokens.append(_Token(kind, token, match.start(), match.end()))
    return tokens


def _touches(text: str, start: int, end: int) -> bool:
    """Whether the letter at these indices stands directly at a digit, an operator or a bracket."""
    return any(near and near in "0123456789+*/^_(){}[]=-" for near in (text[start - 1 : start], text[end : end + 1]))


def _runs(text: str) -> list[_Run]:
    runs: list[_Run] = []
    run: list[_Token] = []
    before, depth = "line", list[str]()

    def over(kind: str) -> None:
        nonlocal run, before
        if run:
            runs.append(_Run(run, before, kind))
        run, before = [], kind
        depth.clear()

    for token in _tokens(text):
        kind = token.kind
        if kind in ("blank", "space"):
            continue
        if kind == "comma" and any(opened in "([" or opened == "\\{" for opened in depth):
            run.append(token)
        elif kind in ("word", "relation", "break", "comma") or (kind == "close" and not depth):
            over("line" if token.text == "\n" else kind)
        else:
            if run and token.start > run[-1].end and run[-1].kind in _ENDS and kind in _BEGINS and not _follows(text, run[-1], token):
                over("word")
            if kind == "open":
                depth.append(token.text)
            elif kind == "close":
                depth.pop()
            run.append(token)
    over("line")
    return runs


def _follows(text: str, last: _Token, token: _Token) -> bool:
    """Whether a factor after a blank belongs to the same product as the factor before the blank."""
    if "command" in (last.kind, token.kind) or (last.kind == "close" and last.text == "}"):
        return True
    return last.kind == token.kind == "number" and last.text.isdigit() and _MIXED.match(text, token.start) is not None


def _value(text: str, run: _Run) -> str | None:
    tokens = _unclosed(_without_marks(text, run), run)
    if tokens is None or not tokens:
        return None
    if tokens[-1].kind == "operator":
        # `5/hour` and `5 - as I said` go on in words.
        if run.behind != "word" or tokens[-1].text not in ("-", "/"):
            return None
        tokens = tokens[:-1]
    if tokens and tokens[0].kind == "operator" and tokens[0].text not in ("-", "−"):
        return None
    start, end = (tokens[0].start, tokens[-1].end) if tokens else (0, 0)
    value = text[start:end]
    broken = run.behind == "relation" and not text[end:].strip().strip("=<>≈≤≥≠$ ")
    barred = text[start - 1 : start] == text[end : end + 1] == "|"
    return None if not value or broken or barred or _is_arithmetic(value, tokens) else value


def _without_marks(text: str, run: _Run) -> list[_Token]:
    """Removes bullets, dashes and emphasis of Markdown from a run."""
    tokens = list(run.tokens)
    while tokens and tokens[-1].text in ("*", "**", "_") and (len(tokens) == 1 or tokens[-2].end == tokens[-1].start):
        tokens.pop()
    while tokens and tokens[0].kind == "operator":
        glued = text[tokens[0].end : tokens[0].end + 1].strip() != ""
        mark = tokens[0].text in ("*", "**", "_", "+") if glued else tokens[0].text in "-−" or run.before == "line"
        if not mark or (glued and tokens[0].start and text[tokens[0].start - 1].isalnum()):
            break
        tokens.pop(0)
    return tokens


def _unclosed(tokens: list[_Token], run: _Run) -> list[_Token] | None:
    """Removes brackets whose counterpart lies outside the run, among words. Returns None if the run breaks off inside a bracket."""
    opened: list[int] = []
    for i, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(i)
        elif token.kind == "close" and opened:
            opened.pop()
    if not opened:
        return tokens
    if run.behind == "line" or any(tokens[i].text not in ("(", "[") for i in opened):
        return None
    tokens = tokens[opened[-1] + 1 :] or tokens[: opened[0]]
    last = max((i for i, token in enumerate(tokens) if token.kind == "comma"), default=-1)
    return tokens[last + 1 :] if opened and last >= 0 else tokens


def _is_arithmetic(value: str, tokens: list[_Token]) -> bool:
    """Whether a value is arithmetic on numbers alone: a sum, difference or product that is not carried out."""
    symbols = [token for token in tokens if token.kind in ("letter", "command") and token.text not in _FRACTIONS]
    if symbols or _SCIENTIFIC.fullmatch(value) or any(token.kind == "comma" for token in tokens):
        return False
    pairs = pairwise(tokens)
    return any(b.kind == "operator" and b.text not in ("^", "**", "/", ":", "_") and a.kind in _ENDS for a, b in pairs)
