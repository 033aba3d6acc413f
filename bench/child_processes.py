"""What processes of their own cost: the time of a reward call, a template render, a step of an environment and a run of the sandbox.

    ./run python bench/child_processes.py [CALLS]

Printed for each: the seconds until the first call has an answer, its process's start included, and the median of the later calls, in
milliseconds. The functions do nothing, so what is measured is the way there and back.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from argosy.data.chat import template
from argosy.rl.environments.pool import EnvironmentPool
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.sandbox import available, run_code

CALLS = 400
CODE = """
def none(completions):
    return [0.0] * len(completions)

class Echo:
    def reset(self): return "begin"
    def step(self, said):
        from argosy.rl.environment import Turn
        return Turn(said)
"""
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else CALLS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "own.py")
        file.write_text(CODE)
        print(f"{'':24} {'first (s)':>10} {'then (ms)':>10}")
        rewards(file, calls)
        templates(calls)
        environments(file, calls)
        if not available():
            show("sandbox, empty program", calls // 20, lambda: run_code(""))


def rewards(file: Path, calls: int) -> None:
    texts = ["four words are here"] * 64
    for workers in (1, 2):
        start_time = time.perf_counter()
        with open_rewards([RewardSettings(of=f"{file}:none")], workers=workers, columns=[]) as scores:
            start = time.perf_counter() - start_time
            show(f"reward, processes: {workers}", calls, partial(scores, texts, texts, {}), start)


def templates(calls: int) -> None:
    messages = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]
    show("template", calls, lambda: template.render(CHATML, messages, {}))


def environments(file: Path, calls: int) -> None:
    source = {"of": "Echo", "file": str(file), "function": "Echo", "source": file.read_text(), "args": {}}
    start_time = time.perf_counter()
    pool = EnvironmentPool(source, 10.0, [])
    try:
        played = pool.open()

        def ask(document: dict[str, Any]) -> None:
            played.ask({"seed": 0} | document)
            while played.reply is None:
                pool.look([played], 1.0)

        ask({"reset": {}})
        start = time.perf_counter() - start_time
        show("environment", calls, lambda: ask({"step": "on"}), start)
        show("environment, new process", calls // 4, lambda: pool.end(pool.open()))
    finally:
        pool.close()


def show(name: str, calls: int, call: Callable[[], object], start: float = 0.0) -> None:
    times = []
    for _ in range(max(2, calls)):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    print(f"{name:24} {start + times[0]:10.3f} {1000 * median(times[1:]):10.3f}", flush=True)


if __name__ == "__main__":
    main()
