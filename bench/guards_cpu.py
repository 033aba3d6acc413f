"""What guards cost a training step: the compiled step with and without them, alternately in one process.

    ./run python bench/guards_cpu.py [steps=20] [rounds=9]

Prints the median seconds of a step of `tiny` and of a wider model for each variant, its CPU seconds, and their ratios to the step
without a guard. The variants take turns, so that a slow moment of the machine meets all of them.
"""

import sys
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import jax

from argosy.run.assembly import state as states
from argosy.run.assembly import updates
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.decided import Decided
from argosy.run.hooks.replay import Replay
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

DATA = ["data.source=synthetic", "data.sequence=128", "data.batch=16", "eval.batches=0"]
WIDE = [
    "model.width=256",
    "model.layers=4",
    "model.ffn=1024",
    "model.heads=4",
    "model.kv_heads=4",
    "model.head_size=64",
]
SHAPES = {"tiny": [], "256 wide, 4 layers": WIDE}
SKIP = ["guard.nonfinite=skip"]
VARIANTS = {"no guard": None, "stop": [], "skip": SKIP, "skip, spikes": [*SKIP, "guard.spike=skip"]}
VARIANTS |= {"every 10th twice": ["guard.replay=10"]}


class Step:
    """A compiled step with its state and a batch."""

    def __init__(self, words: list[str], variant: list[str] | None):
        settings = compose(Run, "tiny", [*words, *DATA, *(variant or [])]).value
        guard_step, begin = updates.guard_step, states.begin
        bare = variant is None
        with (
            patch.object(updates, "guard_step", (lambda step, guard: step) if bare else guard_step),
            patch.object(states, "begin", (lambda guard: None) if bare else begin),
            patch.object(Assembly, "_guard", (lambda self, arrays: None) if bare else Assembly._guard),
        ):
            a = assemble(settings, Decided.here(settings))
            self.update, self.state, self.batch = a.compile(), a.start(), a.place(next(a.batches))
        a.close()
        self.metrics: Any = None
        every, plain = settings.guard.replay, lambda update, state, batch, step: update(state, batch)
        self.replay: Any = Replay(every, a.places, a.shapes, a.mesh) if every else plain

    def run(self, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds of a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(1, steps + 1):
            update = lambda state, batch: self.update(state, batch, {})  # noqa: E731
            self.state, self.metrics = self.replay(update, self.state, self.batch, step)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    options = {"steps": 20, "rounds": 9} | {
        key: int(value) for key, _, value in (word.partition("=") for word in sys.argv[1:])
    }
    print("| model | variant | s | CPU s | s, of no guard | CPU s, of no guard | loss |\n|---|---|---|---|---|---|---|")
    for shape, words in SHAPES.items():
        steps = {name: Step(words, variant) for name, variant in VARIANTS.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for turn in range(options["rounds"] + 1):
            for name, step in steps.items():
                took = step.run(options["steps"])
                # The first turn touches memory for the first time.
                times[name] += [took] if turn else []
        bare = times["no guard"]
        for name, took in times.items():
            wall, cpu = (median(pair[i] / other[i] for pair, other in zip(took, bare, strict=True)) for i in (0, 1))
            loss = float(steps[name].metrics["loss"])
            middle = [median(pair[i] for pair in took) for i in (0, 1)]
            print(
                f"| {shape} | {name} | {middle[0]:.4f} | {middle[1]:.4f} | {wall:.3f} | {cpu:.3f} | {loss!r} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
