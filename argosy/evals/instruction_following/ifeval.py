"""IFEval (arXiv:2311.07911): whether a response follows instructions that a program can check.

    strict             the response itself is checked
    loose              any of eight versions may follow the instruction: the response without its first line, its last line, both or
                       neither, with or without asterisks; so an introduction or markdown is no failure
    prompt level       the share of prompts of which all instructions are followed
    instruction level  the share of all instructions that are followed

An empty response follows no instruction.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from argosy.evals.instruction_following.checks import follows
from argosy.evals.statistics import RowScores


def instruction_accuracies(number: int, row: Mapping[str, Any], response: str) -> RowScores:
    """The four accuracies of a row. At the instruction level, the weight of the row is its number of instructions.

    Args:
        number: the index of the row.
    """
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
    """The eight versions of a response that the loose accuracy checks."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text.replace("*", "") if bare else text for text, bare in product(cut, (False, True))]


def _follows(kind: str, response: str, arguments: Mapping[str, Any]) -> bool:
    return bool(response.strip()) and follows(kind, response, arguments)
