"""Chooses the tests that the default run leaves out because of their time, from the durations of a run of all of them.

    ./run test --durations=0 --durations-min=0.05 > durations.txt
    ./run python tests/slow_cases.py durations.txt [seconds=600]

Writes `slow_cases.txt`: each line is a test that `conftest.py` marks `slow`. Of a test with several cases the fastest ones stay, at
least one if it takes two seconds at most or is a law of families; the costliest tests go first, until the others take so many seconds
of a core. Tests of a few lines that a fixture makes slow stay, since the next test would pay for it. What is slow already stays so.
Seconds are divided by `load`, for a run beside other work.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_name("slow_cases.txt")
LINE = re.compile(r"\s*([\d.]+)s (call|setup|teardown)\s+(tests/\S+::.+)$")
# The cases of a test that stay take together at most so many seconds, or there is but one, of at most so many.
KEPT_S, ALONE_S = 0.8, 2.0
# Tests of which one case stays whatever it takes.
LAWS = "tests/laws/test_family.py"


def durations_of(text: str) -> tuple[dict[str, float], float]:
    """The seconds of each test's call, and those of all fixtures."""
    calls, fixtures = dict[str, float](), 0.0
    for line in text.splitlines():
        if match := LINE.match(line):
            if match[2] == "call":
                calls[match[3]] = float(match[1])
            else:
                fixtures += float(match[1])
    return calls, fixtures


def slow_cases(calls: dict[str, float], fixtures: float, seconds: float) -> list[str]:
    """The tests to leave out."""
    tests: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, duration in calls.items():
        tests[name.partition("[")[0]].append((duration, name))
    # What can go: (seconds of the costliest unit first, tests).
    units: list[tuple[float, list[str]]] = []
    for cases in tests.values():
        kept_s = 0.0
        for i, (duration, name) in enumerate(sorted(cases)):
            if "[" not in name or (i and kept_s + duration > KEPT_S) or (duration > ALONE_S and not name.startswith(LAWS)):
                units.append((duration, [name]))
            else:
                kept_s += duration
    remaining, out = sum(calls.values()) + fixtures, list[str]()
    for duration, names in sorted(units, reverse=True):
        if remaining <= seconds:
            break
        remaining -= duration
        out += names
    print(f"{len(out)} of {len(calls)} tests of at least {min(calls.values()):.2f} s are slow; {remaining:.0f} s are left")
    return sorted(out)


def main(words: list[str]) -> int:
    options = dict(word.split("=") for word in words[1:])
    calls, fixtures = durations_of(Path(words[0]).read_text(encoding="utf-8"))
    load = float(options.get("load", 1))
    slow = slow_cases({name: s / load for name, s in calls.items()}, fixtures / load, float(options.get("seconds", 600)))
    before = FILE.read_text(encoding="utf-8").splitlines()
    FILE.write_text("".join(f"{name}\n" for name in sorted({*slow, *before})), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
