"""Rollouts sampled by the trainer's process, beside one and two processes of their own, with and without rollouts ahead.

    ./run python bench/rollout_processes.py [steps=12] [turns=2]

GRPO on random prompts, a Llama of 3 M parameters, 64 answers of 32 tokens whose end is ignored. The ways take turns, each in a new
process, so that a busy moment hits all; prints medians over the steps after the first three of all turns, in seconds, and from the last
turn whether losses are those of the first way.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

WORDS = ["model.family=llama", "model.width=192", "model.layers=6", "model.ffn=512", "model.heads=6", "model.kv_heads=2"]
WORDS += ["model.vocab=258", "model.context=128", "data.sequence=48", "data.batch=64", "data.held_out=0", "schedule=constant"]
WORDS += ["rollout.completions=8", "rollout.tokens=32", "rollout.rows=16", "rollout.workers=1", "rollout.ignore_eos=true"]
WORDS += ["optimizer.learning_rate=1e-4", "eval.batches=0", "checkpoint.every=1000", "log.every=1", "mesh.data=1", "mesh.fsdp=1"]
WAYS = {
    "in the trainer's process": [],
    "one process": ["rollout.processes=1"],
    "two processes": ["rollout.processes=2"],
    "one process, one rollout ahead": ["rollout.processes=1", "rollout.ahead=1"],
    "two processes, one rollout ahead": ["rollout.processes=2", "rollout.ahead=1"],
}
REWARD = """
def digits(completions):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
"""
# A run's clock at each logged step is the time of its line.
PROGRAM = """
import sys, time, json, argosy
from argosy.run.view import Quiet
times = []
class View(Quiet):
    def step(self, step, numbers):
        times.append((time.monotonic(), {k: numbers[k] for k in ("loss", "reward", "generate_s", "weights_s") if k in numbers}))
argosy.fit("grpo", *sys.argv[2:], view=View())
json.dump(times, open(sys.argv[1], "w"))
"""


def main(steps: int = 12, turns: int = 2) -> None:
    results: dict[str, list[list[tuple[float, dict[str, float]]]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i % 7}="}) + "\n" for i in range(400)))
        (folder / "reward.py").write_text(REWARD)
        common = [*WORDS, f"data.source={folder / 'prompts.jsonl'}", f"reward={folder / 'reward.py'}:digits", f"steps={steps}"]
        for turn in range(turns):
            for i, (name, words) in enumerate(WAYS.items()):
                out = folder / f"{turn}-{i}"
                command = [sys.executable, "-c", PROGRAM, f"{out}.json", *common, *words, f"dir={out}"]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                results[name].append(json.loads(Path(f"{out}.json").read_text()))
    print("| sampled | s a step | generate_s | weights_s | losses |\n|---|---|---|---|---|")
    losses = {name: [numbers["loss"] for _, numbers in runs[-1]] for name, runs in results.items()}
    first = losses[next(iter(WAYS))]
    for name, runs in results.items():
        spent = [b[0] - a[0] for run in runs for a, b in pairwise(run[3:])]
        cells = [statistics.median(spent)]
        for metric in ("generate_s", "weights_s"):
            cells.append(statistics.median(numbers.get(metric, 0.0) for run in runs for _, numbers in run[3:]))
        apart = max(abs(a - b) for a, b in zip(losses[name], first))
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {'the same' if not apart else f'{apart:.1e} apart'} |")


if __name__ == "__main__":
    main(**{name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
