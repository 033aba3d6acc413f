"""Built-in rewards: functions like those of users, each for one completion alone. Rows whose column is empty have no reward.

A completion is a text, or the text of its last message.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The format of DeepSeek-R1 (arXiv:2501.12948, table 1).
R1 = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Of a call's time, for running tests; the rest is for starting the last of them.
SHARE = 0.8


def text_of(completion: Any) -> str:
    """A completion, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def _each(completions: Sequence[Any], column: Sequence[Any], reward: Callable[[str, Any], float]) -> list[float | None]:
    return [None if item in (None, "", []) else reward(text_of(one), item) for one, item in zip(completions, column, strict=True)]


def exact(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where a completion is the answer, blanks at both ends aside; 0 elsewhere."""
    return _each(completions, answer, lambda text, right: float(text.strip() == str(right).strip()))


def maths(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where a completion ends with the right answer to a question of mathematics (`argosy.rl.maths`); 0 elsewhere."""
    from argosy.rl.maths import grade

    return _each(completions, answer, lambda text, right: float(grade(text, right)))


def format(completions: Sequence[Any], format: Sequence[str | None] | None = None) -> list[float | None]:
    """1 where a whole completion is `<think> </think> <answer> </answer>`, as of DeepSeek-R1, or matches the regular expression in the
    column `format`, in which a dot is also the end of a line; 0 elsewhere."""
    patterns = format or [None] * len(completions)
    found = zip(completions, patterns, strict=True)
    return [float(re.fullmatch(pattern or R1, text_of(one), re.DOTALL) is not None) for one, pattern in found]


def code(completions: Sequence[Any], tests: Sequence[Any], timeout: float = 10.0) -> list[float | None]:
    """The share of tests that the last Python block of a completion passes, each in a sandbox of its own (`argosy.rl.sandbox`).

    tests: for each completion a list of Python texts, run behind the code and passed if they end without an exception (MBPP, arXiv:
    2108.07732); or of {input, output}, where the code as a program writes the output, blanks at the ends of lines aside (APPS,
    arXiv:2105.09938). One text is one test. A test that is not reached in `timeout` seconds is not passed; 0 without a block.

    A test in Python shares its process with the code, which can read it and end before it: ending early is no pass, but a program that
    is written to deceive can still succeed. Input and output have no such hole: the process does not get the expected output.
    """
    return _each(completions, tests, lambda text, its: _share([its] if isinstance(its, str | Mapping) else list(its), text, timeout))


def _share(tests: list[Any], text: str, timeout: float) -> float:
    blocks = BLOCK.findall(text)
    until = time.monotonic() + SHARE * timeout
    passed = [bool(blocks) and _passes(blocks[-1], test, until - time.monotonic()) for test in tests]
    return sum(passed) / len(passed)


def _passes(program: str, test: Any, left: float) -> bool:
    from argosy.rl.sandbox import Limits, run_code

    if left <= 0:
        return False
    # Rounded up: a loop that ended by its processor time would leave time to the tests after it.
    limits = Limits(cpu_s=max(1, math.ceil(left)), wall_s=left, output_kb=1024)
    if isinstance(test, Mapping):
        ran = run_code(program, str(test["input"]), limits)
        return ran.exit_code == 0 and not ran.capped and _lines(ran.stdout) == _lines(str(test["output"]))
    import secrets

    # Known to nobody before this run, and printed only behind the test.
    end = secrets.token_hex(16)
    ran = run_code(f"{program}\n\n{test}\n\nprint({end!r})\n", limits=limits)
    return ran.exit_code == 0 and ran.stdout.rstrip().endswith(end)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


for _function in (exact, maths, format, code):
    _function.per_completion = True  # pyright: ignore[reportFunctionMemberAccess]
