"""Makes every fault of the table in docs/guides/faults.md again and again, by the tests that the table names.

    ./run python tests/campaign_faults.py [n=5] [only=PART OF A NAME,ANOTHER]

Prints a row for each test: how often it was right, and the seconds (median, most) until the fault was noticed and until its end:
training went on, the next save worked, or the processes had ended. Only tests that run real processes measure seconds
(`clock` in conftest.py). A test that is left out on this machine is told with its reason. Exit code 1 where one was wrong or missing.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "faults.md"
Case = tuple[str, str, dict[str, float]]
"""How it ended, why, and its seconds."""


def tests_of_table() -> list[str]:
    """The tests and files of tests of the guide's table, each once, in its order; campaigns are programs of their own."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| ") and "`test_" in line]
    return list(dict.fromkeys(name for row in rows for name in re.findall(r"`(test_\w+(?:\.py)?)`", row.rpartition(" | ")[2])))


def homes(name: str) -> list[Path]:
    """The files that hold a test, or the file itself."""
    files = [*(ROOT / "tests").rglob(name if name.endswith(".py") else "test_*.py")]
    return [file for file in files if name.endswith(".py") or f"\ndef {name}(" in file.read_text()]


def cases(name: str, home: Path) -> Iterator[Case]:
    """One run of a test: every case of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        target = str(home) if name.endswith(".py") else f"{home}::{name}"
        words = [target, "-m", "slow or not slow", "-q", "-n0", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            yield "wrong", done.stdout[-2000:] + done.stderr[-2000:], {}
            return
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [failure for failure in case if failure.tag in ("failure", "error")]
            skipped = case.find("skipped")
            seconds = {figure.attrib["name"]: float(figure.attrib["value"]) for figure in case.iter("property")}
            if bad:
                yield "wrong", (bad[0].text or "")[-2000:], seconds
            elif skipped is not None:
                yield "left out", skipped.attrib.get("message", ""), seconds
            else:
                yield "right", "", seconds


def summary_of(outcomes: list[Case], figure: str) -> str:
    seconds = [figures[figure] for _, _, figures in outcomes if figure in figures]
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""


def main(words: list[str]) -> int:
    options = {"n": "5", "only": ""} | dict(word.split("=") for word in words)
    names = [name for name in tests_of_table() if any(part in name for part in options["only"].split(","))]
    lost, missing = 0, [name for name in names if len(homes(name)) != 1]
    if missing or not names:
        print(f"no test, or more than one, of these names: {', '.join(missing) or options['only']}")
        return 1
    print("| test | right | noticed after s: median (most) | over after s: median (most) |\n|---|---|---|---|", flush=True)
    for name in names:
        (home,) = homes(name)
        outcomes = [case for _ in range(int(options["n"])) for case in cases(name, home)]
        right = sum(status == "right" for status, _, _ in outcomes)
        print(
            f"| `{name}` | {right} of {len(outcomes)} | {summary_of(outcomes, 'noticed')} | {summary_of(outcomes, 'over')} |",
            flush=True,
        )
        for status, why, _ in outcomes:
            if status != "right":
                print(f"{status}: {why}", file=sys.stderr, flush=True)
        lost += right < len(outcomes)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
