"""The built-in reward `math_verify`: the library of that name (Apache-2.0), which `pip install '.[maths]'` brings.

The library contains an algebra system of 34 MB, which takes two seconds of CPU to import in each process. Its verdicts differ from
those of `maths` in some cases, so each reward has its own name.
"""

from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

from argosy.rl.rewards.builtin import _each


def math_verify(
    completions: Sequence[Any],
    answer: Sequence[Any],
    finish_reasons: Sequence[str] | None = None,
    thinking_prompts: Sequence[bool] | None = None,
) -> list[float | None]:
    """Scores 1 if the library finds the right answer in a completion, 0 otherwise, and None if it finds no answer in the column
    `answer`. In a completion that the token limit cut, only a box counts.
    """
    cuts = [reason == "length" for reason in finish_reasons or ["stop"] * len(completions)]
    references = [None if right in (None, "", []) else (right, cut) for right, cut in zip(answer, cuts, strict=True)]
    return _each(completions, references, lambda text, its: _verified(text, *its), thinking_prompts)


def _verified(text: str, right: Any, cut: bool) -> float | None:
    gold = parse(str(right)) or parse(f"${right}$")
    if cut and "\\boxed" not in text:
        return 0.0 if gold else None
    return float(verify(gold, parse(text))) if gold else None


math_verify.per_completion = True  # pyright: ignore[reportFunctionMemberAccess]
