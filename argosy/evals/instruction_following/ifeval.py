"""IFEval (arXiv:2311.07911): whether a response follows instructions that a program can check.

Strict: the response as it is. Loose: any of eight versions of it, without its first line, its last line or both, and each without
asterisks; so an introduction or markdown does not fail an instruction that the rest follows. An empty response follows none.
Prompt level: all instructions of a prompt; instruction level: of all instructions.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from argosy.evals.instruction_following.checks import follows
from argosy.evals.statistics import RowScores


def instruction_accuracies(number: int, row: Mapping[str, Any], response: str) -> RowScores:
    """The four accuracies of a row. At the instruction level its weight is its number of instructions."""
    each = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    strict = [_follows(kind, response, arguments) for kind, arguments in each]
    loose = [any(_follows(kind, version, arguments) for version in loose_responses(response)) for kind, arguments in each]
    values, weights = {}, {}
    for name, verdicts in (("strict", strict), ("loose", loose)):
        values[f"prompt_level_{name}_acc"] = float(all(verdicts))
        values[f"inst_level_{name}_acc"] = sum(verdicts) / len(verdicts)
        weights[f"inst_level_{name}_acc"] = float(len(verdicts))
    answer = {"text": response, "followed": {kind: bool(s) for (kind, _), s in zip(each, strict)}}
    return RowScores(number, values, weights, answer)


def loose_responses(response: str) -> list[str]:
    """The eight versions of a response that the loose accuracy accepts."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text.replace("*", "") if bare else text for text, bare in product(cut, (False, True))]


def _follows(kind: str, response: str, arguments: Mapping[str, Any]) -> bool:
    return bool(response.strip()) and follows(kind, response, arguments)
