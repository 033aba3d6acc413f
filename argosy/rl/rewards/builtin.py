"""Built-in reward functions. Each scores one completion at a time. A completion whose column `answer` or `tests` is empty has no
reward.

A completion is a text, or a list of messages, of which the text of the last one is graded. All functions but `format` grade the text
after the thoughts. A completion whose thought is not closed scores 0.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from argosy.rl.rewards.thoughts import without_thoughts

# The format of DeepSeek-R1 (arXiv:2501.12948, table 1).
R1 = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Of a call's time, for running tests; the rest is for starting the last of them.
SHARE = 0.8


def completion_text(completion: Any) -> str:
    """Returns a completion that is a text, or the content of its last message if it is a list of messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def _each(
    completions: Sequence[Any],
    column: Sequence[Any],
    reward: Callable[[str, Any], float | None],
    thinking_prompts: Sequence[bool] | None,
) -> list[float | None]:
    """Grades the text of each completion after its thoughts.

    Args:
        column: the right answer of each completion, or its tests; None or empty where there is no reward.
        reward: (text, entry of the column) -> the reward.
        thinking_prompts: whether the prompt of each completion has opened a thought.
    """
    opened = thinking_prompts or [False] * len(completions)
    rows = zip(completions, column, opened, strict=True)
    texts = [(without_thoughts(completion_text(completion), inside), item) for completion, item, inside in rows]
    return [None if item in (None, "", []) else 0.0 if text is None else reward(text, item) for text, item in texts]


def exact(completions: Sequence[Any], answer: Sequence[Any], thinking_prompts: Sequence[bool] | None = None) -> list[float | None]:
    """Scores 1 if a completion equals the answer, apart from leading and trailing blanks; 0 otherwise."""
    return _each(completions, answer, lambda text, right: float(text.strip() == str(right).strip()), thinking_prompts)


def maths(
    completions: Sequence[Any],
    answer: Sequence[Any],
    finish_reasons: Sequence[str] | None = None,
    thinking_prompts: Sequence[bool] | None = None,
) -> list[float | None]:
    """Scores 1 if a completion ends with the right answer to a question of mathematics (`argosy.rl.rewards.maths`); 0 otherwise. In a
    completion that the token limit cut, only a finished answer counts.
    """
    return _graded(completions, answer, finish_reasons, thinking_prompts, strict=False)


def maths_strict(
    completions: Sequence[Any],
    answer: Sequence[Any],
    finish_reasons: Sequence[str] | None = None,
    thinking_prompts: Sequence[bool] | None = None,
) -> list[float | None]:
    """Scores as `maths` does, but an answer counts only in \\boxed{} or after ####."""
    return _graded(completions, answer, finish_reasons, thinking_prompts, strict=True)


def _graded(
    completions: Sequence[Any],
    answer: Sequence[Any],
    finish_reasons: Sequence[str] | None,
    thinking_prompts: Sequence[bool] | None,
    strict: bool,
) -> list[float | None]:
    from argosy.rl.rewards.maths import grade

    cuts = [reason == "length" for reason in finish_reasons or ["stop"] * len(completions)]
    rows = [(right, cut) for right, cut in zip(answer, cuts, strict=True)]
    references = [None if right in (None, "", []) else (right, cut) for right, cut in rows]
    return _each(completions, references, lambda text, its: float(grade(text, its[0], cut=its[1], strict=strict)), thinking_prompts)


def format(completions: Sequence[Any], format: Sequence[str | None] | None = None) -> list[float | None]:
    """Scores 1 if a whole completion matches the regular expression in the column `format`, whose dot also matches line breaks; 0
    otherwise. The default pattern is `<think> </think> <answer> </answer>`, as in DeepSeek-R1.
    """
    patterns = format or [None] * len(completions)
    rows = zip(completions, patterns, strict=True)
    return [float(re.fullmatch(pattern or R1, completion_text(completion), re.DOTALL) is not None) for completion, pattern in rows]


def code(
    completions: Sequence[Any], tests: Sequence[Any], thinking_prompts: Sequence[bool] | None = None, timeout: float = 10.0
) -> list[float | None]:
    """Scores the share of tests that the last Python block of a completion passes. Each test runs in its own sandbox
    (`argosy.rl.sandbox`).

    There are two kinds of tests. A test in Python is run after the code, and passes if it ends without an exception (MBPP,
    arXiv: 2108.07732). For a test {input, output} the code runs as a program and must write the output, apart from blanks at the ends
    of lines (APPS, arXiv:2105.09938). A test that takes more than `timeout` seconds fails. A completion without a block scores 0.

    A test in Python shares its process with the code, so the code can read the test and exit before it. Exiting early does not pass,
    but a program that is written to deceive can still succeed. Tests by input and output have no such hole, because the process never
    receives the expected output.

    Args:
        tests: a list of tests, or one test, for each completion.
        timeout: the time limit of a test in seconds.
    """
    share = lambda text, its: _share([its] if isinstance(its, str | Mapping) else list(its), text, timeout)  # noqa: E731
    return _each(completions, tests, share, thinking_prompts)


def _share(tests: list[Any], text: str, timeout: float) -> float:
    blocks = BLOCK.findall(text)
    until = time.monotonic() + SHARE * timeout
    passed = [bool(blocks) and _passes(blocks[-1], test, until - time.monotonic()) for test in tests]
    return sum(passed) / len(passed)


def _passes(program: str, test: Any, remaining: float) -> bool:
    from argosy.rl.sandbox import SandboxLimits, run_code

    if remaining <= 0:
        return False
    # Rounded up: a loop that ended by its processor time would leave time to the tests after it.
    limits = SandboxLimits(cpu_s=max(1, math.ceil(remaining)), wall_s=remaining, output_kb=1024)
    if isinstance(test, Mapping):
        outcome = run_code(program, str(test["input"]), limits)
        return outcome.exit_code == 0 and not outcome.capped and _lines(outcome.stdout) == _lines(str(test["output"]))
    import secrets

    # Known to nobody before this run, and printed only behind the test.
    end = secrets.token_hex(16)
    outcome = run_code(f"{program}\n\n{test}\n\nprint({end!r})\n", limits=limits)
    return outcome.exit_code == 0 and outcome.stdout.rstrip().endswith(end)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


for _function in (exact, maths, maths_strict, format, code):
    _function.per_completion = True  # pyright: ignore[reportFunctionMemberAccess]
