"""What comparing processes costs, over real ones whose steps sleep.

    ./run python bench/stragglers_cpu.py [steps=60] [seconds=1.0] [processes=2]

A step is a sleep of so many seconds, so what a loop takes beside is what was put around the step. Each process makes `steps` steps
without and with `run.hooks.pace.PaceMeter`, in turns of ten. Prints, for the first process: seconds that a step takes more (mean, with
the timings of the device in it), CPU seconds of the process a step (and before there was a thread), and both as shares of the step.
"""

import json
import os
import statistics
import subprocess
import sys
import time


def main(words: list[str]) -> None:
    options = {"steps": "60", "seconds": "1.0", "processes": "2"} | dict(word.split("=") for word in words)
    if "ARGOSY_RANK" not in os.environ:
        supervise(int(options["processes"]), words)
        return
    from argosy.launch.cluster import detect_place, join

    place = detect_place(os.environ)
    assert place is not None
    join(place)
    measure(int(options["steps"]), float(options["seconds"]))


def supervise(count: int, words: list[str]) -> None:
    from argosy.launch.ports import HeldPort

    port = HeldPort()
    base = os.environ | {"JAX_PLATFORMS": "cpu", "ARGOSY_COORDINATOR": f"127.0.0.1:{port.number}", "ARGOSY_PROCESSES": str(count)}
    started = []
    for rank in range(count):
        out = subprocess.DEVNULL if rank else None
        started.append(subprocess.Popen([sys.executable, __file__, *words], env=base | {"ARGOSY_RANK": str(rank)}, stdout=out))
    for process in started:
        process.wait()
    port.close()


def measure(steps: int, seconds: float) -> None:
    import jax
    import jax.numpy as jnp

    from argosy.observe.goodput import Clock
    from argosy.parallel import processes
    from argosy.run.hooks.pace import PaceMeter
    from argosy.train.straggler_settings import StragglerSettings

    clock, ready = Clock(), {"loss": jnp.zeros(())}

    def update(state, batch):
        time.sleep(seconds)
        return state, ready

    before = time.process_time()
    for _ in range(10):
        update(None, None)
    before = (time.process_time() - before) / 10
    warnings: list[str] = []
    pace = PaceMeter(StragglerSettings(), jax.local_devices(), clock, lambda: 0, warnings.append, lambda line: None)
    pace.host = f"rank-{processes.rank()}"
    measured = pace(update)
    walls: dict[str, list[float]] = {"without": [], "with": []}
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(2 * steps // 10):
        name = ("without", "with")[turn % 2]
        do = (update, measured)[turn % 2]
        processes.run_together("turn", lambda: None)
        for _ in range(10):
            wall, used = time.perf_counter(), time.process_time()
            with clock("step"):
                do(None, None)
            walls[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - used)
    pace.close()
    longer = statistics.fmean(walls["with"]) - statistics.fmean(walls["without"])
    # The thread runs in both.
    busy = statistics.fmean(cpu["with"])
    print(json.dumps({
        "processes": processes.process_count(), "step_s": seconds, "longer_s": round(longer, 6), "share": round(longer / seconds, 5),
        "median_longer_s": round(statistics.median(walls["with"]) - statistics.median(walls["without"]), 6),
        "cpu_s": round(busy, 6), "cpu_before_s": round(before, 6), "cpu_share": round((busy - before) / seconds, 5),
        "probes": pace.probes, "probe_s": round(pace.probe_s, 5), "spacing": pace.spacing, "said": warnings,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
