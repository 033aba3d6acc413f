"""What everything around the training step costs: supervisor, watchdog, comparison of processes, metrics, checkpoints and their hashes.

    ./run python bench/overhead_cpu.py [steps=120] [seconds=1.0] [processes=2] [every=60] [width=512]

`argosy launch processes=N -- train` with all defaults, on a model of about 30 M parameters, whose step is real once and sleeps
afterwards: what the loop takes beside, and the CPU time that is used at all, is what was put around the step. One run saves a
checkpoint every `every` steps, another none, so the difference is saving. Prints for each run: seconds that a step takes longer than
its sleep, CPU seconds a step of the supervisor and of a training process, and both as shares of the step; and the seconds that one
thread takes to hash the bytes of a checkpoint.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600
WARM = 10  # steps that are not counted
# The step of every process: real once, since it makes the numbers that are logged.
SLEEPS = """
import os, runpy, sys, time
from dataclasses import replace
from argosy.core.process import signals
signals.take_over()
from argosy.run.assembly.assembly import Assembly
made = Assembly.with_frozen
def sleeping(self, program):
    import jax
    step, numbers = made(self, program), []
    def update(state, batch):
        if not numbers:
            state, first = step(state, batch)
            numbers.append(jax.block_until_ready(first))
            return state, first
        time.sleep(float(os.environ["BENCH_STEP_S"]))
        return replace(state, step=state.step + 1), numbers[0]
    return update
Assembly.with_frozen = sleeping
sys.argv[0] = "argosy"
runpy.run_module("argosy", run_name="__main__")
"""

# As `argosy launch` does.
SUPERVISES = """
import sys
from argosy.core.process import signals
signals.take_over()
from argosy.jobs.launch import prepared, progress_of
from argosy.launch import local
from argosy.launch.settings import LocalLaunch
count, program, *words = sys.argv[1:]
progress = progress_of(prepared([f"processes={count}"], words))
sys.exit(local.run([sys.executable, "-c", program, *words], LocalLaunch(processes=int(count)), print, progress))
"""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"grad_norm"') if path.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(log.read_text()[-3000:])
        time.sleep(0.02)


def measure(folder: Path, options: dict[str, str], every: int) -> dict[str, float]:
    """Means over the steps after the first ones."""
    steps, seconds, run, log = int(options["steps"]), float(options["seconds"]), folder / "run", folder / "said"
    width = int(options["width"])
    words = [
        "train", "tiny", "data.source=synthetic", f"dir={run}", f"steps={WARM + steps + 1}", "data.sequence=32", "data.batch=8",
        f"model.width={width}", f"model.ffn={4 * width}", "model.layers=8", "model.vocab=1024", f"checkpoint.every={every}",
        "log.every=1", "eval.batches=0",
    ]  # fmt: skip
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "BENCH_STEP_S": options["seconds"]}
    with log.open("wb") as out:
        command = [sys.executable, "-c", SUPERVISES, options["processes"], SLEEPS, *words]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            wait_for(lambda: logged(run) >= WARM, process, log)
            ranks = children(process.pid)
            begun, before, above = time.monotonic(), [cpu_s(rank) for rank in ranks], cpu_s(process.pid)
            wait_for(lambda: logged(run) >= WARM + steps, process, log)
            wall = time.monotonic() - begun
            spent, above = [cpu_s(rank) - first for rank, first in zip(ranks, before, strict=True)], cpu_s(process.pid) - above
        finally:
            process.terminate()
            process.wait()
    return {
        "longer_s": wall / steps - seconds, "longer": wall / steps / seconds - 1, "supervisor_cpu_s": above / steps,
        "process_cpu_s": max(spent) / steps, "cpu": (above + max(spent)) / steps / seconds,
    }  # fmt: skip


def hashing(run: Path) -> tuple[float, float]:
    """GB of the newest checkpoint, and seconds that one thread hashes them."""
    newest = max((path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    files = [file for file in newest.rglob("*") if file.is_file()]
    contents = [file.read_bytes() for file in files]
    begun = time.perf_counter()
    for content in contents:
        hashlib.sha256(content).digest()
    return sum(map(len, contents)) / 1e9, time.perf_counter() - begun


def main(words: list[str]) -> None:
    options = {"steps": "120", "seconds": "1.0", "processes": "2", "every": "60", "width": "512"}
    options |= dict(word.split("=") for word in words)
    with tempfile.TemporaryDirectory() as place:
        for name, every in (("without saving", 10**9), (f"saved every {options['every']} steps", int(options["every"]))):
            figures = measure(Path(place, name), options, every)
            print(json.dumps({"run": name} | {key: round(value, 5) for key, value in figures.items()}), flush=True)
        size, took = hashing(Path(place, name, "run"))
        print(json.dumps({"checkpoint_gb": round(size, 3), "hashing_s": round(took, 3)}))


if __name__ == "__main__":
    main(sys.argv[1:])
