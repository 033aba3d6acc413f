"""How long a server takes to start: `argosy serve` until it is ready, and a warm start by stage.

    ./run python bench/start.py MODEL [TURNS] [serve setting=value ...]    cold, with JAX's cache alone, and warm
    ./run python bench/start.py stages MODEL                               a warm start in this process, after such a one

Cold: nothing is compiled. JAX's cache: its compilation cache is filled, but programs are traced and lowered; the first start after an
update of argosy compiles all of it too. Warm: programs are on disk. Caches are in a folder of their own, which `stages` shares with the
other mode. The file of the weights is read once before, so that it is in memory. CPU time stands beside wall time, since machines are
shared; resident memory when the server is ready, and its peak. On Linux.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHES = Path(tempfile.gettempdir()) / f"argosy-bench-start-{os.getuid()}"
TICKS = os.sysconf("SC_CLK_TCK")


def started(model: str, words: list[str], **env: str) -> tuple[float, ...]:
    """Wall and CPU seconds until ready; resident memory and its peak in MB."""
    start_time = time.perf_counter()
    command = [sys.executable, "-P", "-m", "argosy", "serve", model, "port=0", *words]
    env = {**os.environ, "XDG_CACHE_HOME": str(CACHES), **env}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if line.startswith("ready on"):
                break
        else:
            raise SystemExit("".join(log))
        wall = time.perf_counter() - start_time
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        resident, peak = (int(status[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))
        process.terminate()
    return wall, (int(fields[11]) + int(fields[12])) / TICKS, resident, peak


def starts(model: str, turns: int, words: list[str]) -> None:
    for file in Path(model).rglob("*.safetensors") if Path(model).is_dir() else [Path(model)]:
        file.read_bytes()
    shutil.rmtree(CACHES, ignore_errors=True)
    print("| start | until ready, s | CPU s | resident, MB | peak |\n| --- | --- | --- | --- | --- |")

    def row(name: str, starts: list[tuple[float, ...]]) -> None:
        wall, cpu, resident, peak = (statistics.median(column) for column in zip(*starts))
        least = f" ({min(times[0] for times in starts):.1f} at least)" if len(starts) > 1 else ""
        print(f"| {name} | {wall:.1f}{least} | {cpu:.1f} | {resident:,.0f} | {peak:,.0f} |", flush=True)

    # Programs that are kept are compiled anew, so JAX's cache is filled by a start that keeps none.
    unwritable = {"XDG_CACHE_HOME": str(CACHES / "jax alone"), "JAX_COMPILATION_CACHE_DIR": str(CACHES / "jax")}
    (CACHES / "jax alone" / "argosy").mkdir(parents=True)
    (CACHES / "jax alone" / "argosy" / "programs").write_text("no folder: nothing is kept")
    limits = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    row("cold, nothing kept", [started(model, words, **unwritable, **limits)])
    row("JAX's cache", [started(model, words, **unwritable, **limits) for _ in range(turns)])
    row("cold, programs kept", [started(model, words)])
    row("warm", [started(model, words) for _ in range(turns)])


def stages(model: str) -> None:
    os.environ["XDG_CACHE_HOME"] = str(CACHES)
    last = [time.perf_counter(), time.process_time()]
    print("| stage | wall, s | CPU s |\n| --- | --- | --- |")

    def lap(stage: str) -> None:
        now = time.perf_counter(), time.process_time()
        print(f"| {stage} | {now[0] - last[0]:.2f} | {now[1] - last[1]:.2f} |", flush=True)
        last[:] = now

    from argosy.jobs import machine
    from argosy.serve.settings import ServeSettings

    machine.prepare()
    lap("Python, settings")
    machine.start_jax()
    lap("import jax")
    from argosy.jobs.api import load
    from argosy.ops.programs.store import open_store
    from argosy.serve import run

    lap("import the rest")
    lm = load(model)
    lap("model, weights, tokenizer")
    from argosy.infer.engine.engine import Engine

    engine = Engine(lm.module, ServeSettings().engine, exclusive=True)
    lap("engine")
    store = open_store(machine.programs_folder())
    lap("hash of the sources")
    assert store is not None
    runner = engine.runner
    runner.refresh_weights(lambda: None)
    with runner.programs.ahead(store):
        with runner._described():
            runner._call_all(engine.scheduler.copies)
        lap("programs: names, files; loading has begun")
        runner.caches  # noqa: B018
        lap("pools reserved, while programs load")
    lap("programs loaded")
    engine.warm_up(store)
    lap("again, all ready, and one token")
    assert run is not None


if __name__ == "__main__":
    if sys.argv[1] == "stages":
        stages(sys.argv[2])
    else:
        words = sys.argv[2:]
        turns = int(words.pop(0)) if words and words[0].isdigit() else 3
        starts(sys.argv[1], turns, words)
