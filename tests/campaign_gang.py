"""Runs of several processes, of which one is killed again and again, must end as if nothing had happened.

    ./run python tests/campaign_gang.py [n=20] [seed=0] [sizes=2] [fault=KILL|STOP|TERM]

Without faults, a run of the first size is left alone. Another of the same settings has one of its processes, drawn at random, killed n
times at random moments, and is started again: by the supervisor where there is one size, with the next of the sizes (`sizes=4,2,1`)
where there are several. Where the size stays, every loss must be that of the run that was left alone, bit for bit; over several sizes
to 2e-5: rounding that training has not magnified yet (at a rate of 1e-4); another batch exceeds it a thousandfold.
Prints a line for each fault with the seconds until all were down and until the next step was logged; exit code 1 where anything
differs.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [
    "model.family=llama", "model.width=64", "model.layers=2", "model.ffn=128", "model.heads=2", "model.kv_heads=1", "model.vocab=64",
    "model.context=32", "data.source=synthetic", "data.sequence=16", "data.batch=64", "schedule=constant", "log.every=1",
    "eval.batches=0", "checkpoint.every=20", "optimizer.learning_rate=1e-4",
]  # fmt: skip
TOLERANCE = 2e-5
PATIENCE_S = 120


def started(run: Path, size: int, steps: int, said: Path) -> subprocess.Popen[bytes]:
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own |= {"JAX_PLATFORMS": "cpu", "ARGOSY_HUGE_PAGES": "0"}
    words = ["train", "tiny", *WORDS, f"steps={steps}", f"dir={run}"]
    if size > 1:
        words = ["launch", f"processes={size}", "restarts=100", "--", *words]
    with said.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "argosy", *words], stdout=out, stderr=out, env=own, start_new_session=True)


def losses(run: Path) -> dict[int, set[float]]:
    """All values that were logged for each step."""
    found: dict[int, set[float]] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if "loss" in one:
            found.setdefault(one["step"], set()).add(one["loss"])
    return found


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def members(supervisor: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def more_than(run: Path, before: int, one: subprocess.Popen[bytes]) -> float | None:
    """Seconds until more lines are logged, or the run ended."""
    return wait_for(lambda: lines(run) > before or one.poll() is not None)


def wait_for(what, seconds: float = PATIENCE_S) -> float | None:
    """Seconds until something is true; None if it never was."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if what():
            return time.monotonic() - begun
        time.sleep(0.01)
    return None


def main(words: list[str]) -> int:
    given = {"n": "20", "seed": "0", "sizes": "2", "fault": "KILL"} | dict(word.split("=") for word in words)
    n, rng, sizes = int(given["n"]), random.Random(int(given["seed"])), [int(size) for size in given["sizes"].split(",")]
    fault = getattr(signal, f"SIG{given['fault']}")
    steps, bad, downs, agains = 100 + 40 * n, 0, list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        alone = started(folder / "alone", sizes[0], steps, folder / "said-alone")
        if alone.wait(3600):
            print((folder / "said-alone").read_text()[-3000:])
            return 1
        right = losses(folder / "alone")
        run, said, at = folder / "run", folder / "said", 0
        one = started(run, sizes[0], steps, said)
        for i in range(n):
            before = lines(run)
            if more_than(run, before, one) is None or one.poll() is not None:
                break
            time.sleep(rng.random() * 3)
            group = members(one.pid) if sizes[at] > 1 else [one.pid]
            victim = rng.choice(group or [one.pid])
            logged = lines(run)
            try:
                os.kill(victim, fault)
            except ProcessLookupError:
                continue
            down = wait_for(lambda group=group: not any(map(is_alive, group)))
            if len(sizes) > 1:
                os.killpg(one.pid, signal.SIGKILL)
                for left in members(one.pid):
                    os.kill(left, signal.SIGKILL)
                one.wait()
                wait_for(lambda group=group: not any(map(is_alive, group)))
                at = (at + 1) % len(sizes)
                one = started(run, sizes[at], steps, said)
            elif fault == signal.SIGTERM:
                one.wait()
                one = started(run, sizes[0], steps, said)
            again = more_than(run, logged, one)
            downs.append(down or PATIENCE_S)
            agains.append(again or PATIENCE_S)
            print(f"{i + 1:3} SIG{given['fault']} to {group.index(victim)} of {len(group)}: down after {down or -1:.1f} s, "
                  f"next step after {again or -1:.1f} s; step {max(losses(run), default=0)}", flush=True)  # fmt: skip
        if one.wait(3600):
            print(said.read_text()[-3000:])
            bad += 1
        found, most = losses(run), 0.0
        for step, value in right.items():
            (expected,) = value
            differ = max((abs(x - expected) / abs(expected) for x in found.get(step, {float("inf")})), default=float("inf"))
            most = max(most, differ)
            bad += differ > (TOLERANCE if len(sizes) > 1 else 0)
        if downs:
            print(f"{len(downs)} faults; all down after {statistics.median(downs):.1f} s (at most {max(downs):.1f}), "
                  f"next step after {statistics.median(agains):.1f} s (at most {max(agains):.1f})")  # fmt: skip
        print(f"{len(right)} steps; largest relative difference of a loss {most:.2g}; {bad} bad")
    return int(bool(bad) or not downs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
