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


def start_gang(run: Path, size: int, steps: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "ARGOSY_HUGE_PAGES": "0"}
    words = ["train", "tiny", *WORDS, f"steps={steps}", f"dir={run}"]
    if size > 1:
        words = ["launch", f"processes={size}", "restarts=100", "--", *words]
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "argosy", *words], stdout=out, stderr=out, env=environment, start_new_session=True
        )


def losses(run: Path) -> dict[int, set[float]]:
    """All values that were logged for each step."""
    losses_by_step: dict[int, set[float]] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if "loss" in record:
            losses_by_step.setdefault(record["step"], set()).add(record["loss"])
    return losses_by_step


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


def more_than(run: Path, before: int, process: subprocess.Popen[bytes]) -> float | None:
    """Seconds until more lines are logged, or the run ended."""
    return wait_for(lambda: lines(run) > before or process.poll() is not None)


def wait_for(condition, seconds: float = PATIENCE_S) -> float | None:
    """Seconds until something is true; None if it never was."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.01)
    return None


def main(words: list[str]) -> int:
    options = {"n": "20", "seed": "0", "sizes": "2", "fault": "KILL"} | dict(word.split("=") for word in words)
    n, rng, sizes = int(options["n"]), random.Random(int(options["seed"])), [int(size) for size in options["sizes"].split(",")]
    fault = getattr(signal, f"SIG{options['fault']}")
    steps, bad, downs, agains = 100 + 40 * n, 0, list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        alone = start_gang(folder / "alone", sizes[0], steps, folder / "said-alone")
        if alone.wait(3600):
            print((folder / "said-alone").read_text()[-3000:])
            return 1
        right = losses(folder / "alone")
        run, log, at = folder / "run", folder / "said", 0
        process = start_gang(run, sizes[0], steps, log)
        for i in range(n):
            before = lines(run)
            if more_than(run, before, process) is None or process.poll() is not None:
                break
            time.sleep(rng.random() * 3)
            group = members(process.pid) if sizes[at] > 1 else [process.pid]
            victim = rng.choice(group or [process.pid])
            logged = lines(run)
            try:
                os.kill(victim, fault)
            except ProcessLookupError:
                continue
            down = wait_for(lambda group=group: not any(map(is_alive, group)))
            if len(sizes) > 1:
                os.killpg(process.pid, signal.SIGKILL)
                for pid in members(process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
                wait_for(lambda group=group: not any(map(is_alive, group)))
                at = (at + 1) % len(sizes)
                process = start_gang(run, sizes[at], steps, log)
            elif fault == signal.SIGTERM:
                process.wait()
                process = start_gang(run, sizes[0], steps, log)
            again = more_than(run, logged, process)
            downs.append(down or PATIENCE_S)
            agains.append(again or PATIENCE_S)
            print(f"{i + 1:3} SIG{options['fault']} to {group.index(victim)} of {len(group)}: down after {down or -1:.1f} s, "
                  f"next step after {again or -1:.1f} s; step {max(losses(run), default=0)}", flush=True)  # fmt: skip
        if process.wait(3600):
            print(log.read_text()[-3000:])
            bad += 1
        losses_by_step, most = losses(run), 0.0
        for step, value in right.items():
            (expected,) = value
            differ = max((abs(x - expected) / abs(expected) for x in losses_by_step.get(step, {float("inf")})), default=float("inf"))
            most = max(most, differ)
            bad += differ > (TOLERANCE if len(sizes) > 1 else 0)
        if downs:
            print(f"{len(downs)} faults; all down after {statistics.median(downs):.1f} s (at most {max(downs):.1f}), "
                  f"next step after {statistics.median(agains):.1f} s (at most {max(agains):.1f})")  # fmt: skip
        print(f"{len(right)} steps; largest relative difference of a loss {most:.2g}; {bad} bad")
    return int(bool(bad) or not downs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
