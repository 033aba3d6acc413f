"""What `argosy plan` predicts for this machine, beside what is taken here.

    ./run python bench/plan_here.py [GROUP ...] [turns=3]     groups: training, adapters, rollouts, engine; all by default

Each shape is planned and run in turn, each in a process of its own, as often as `turns` says; a row has the medians. Taken is the
resident memory (of training its largest, of the engine after two rounds that fill its cache), and the tenth of the steps that are
fastest: other processes slow a step, and never speed it up. Engines find their programs on disk, as at a second start.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ARGOSY = [sys.executable, "-c", "from argosy.cli import main; raise SystemExit(main())"]
PROMPT, ANSWER = 128, 128
# Of engines: a preset, what is changed, and the sequences at a time.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("smollm2-135m", {"layers": 4, "context": 512}),
    "qwen": ("qwen3-0.6b", {"layers": 8, "vocab": 32_768, "context": 512}),
    "gemma": ("gemma3-1b", {"layers": 6, "vocab": 32_768, "context": 512}),
    "experts": ("qwen3-30b-a3b", {"layers": 4, "width": 512, "heads": 8, "vocab": 32_768, "context": 512}),
    "latent": ("deepseek2-lite-16b", {"layers": 4, "width": 512, "ffn": 2048, "vocab": 32_768, "context": 512}),
}
FEWER = {"count": 32, "ffn": 256}
STORIES = Path(__file__).parents[2] / "shared" / "data" / "models" / "stories260k"
ENGINES = (
    (str(STORIES), 1), (str(STORIES), 32), ("smollm2", 1), ("smollm2", 8), ("smollm2", 32), ("gemma", 8), ("experts", 1),
    ("experts", 8), ("latent", 1), ("latent", 8), ("qwen", 1), ("qwen", 8),
)  # fmt: skip


# ---------------------------------------------------------------- the engine


def engine_shapes(scratch: Path) -> list[tuple[str, Callable[[], tuple[float, float, float, float]]]]:
    def pair(name: str, count: int) -> tuple[float, float, float, float]:
        folder = scratch / name if name in MODELS else Path(name)
        if not folder.exists():
            subprocess.run([sys.executable, __file__, "--write", name, str(folder)], check=True, capture_output=True)
        words = [f"engine.slots={count}", f"engine.pages={count * (PROMPT + ANSWER) // 16}", f"engine.context={PROMPT + ANSWER}"]
        sizes = [f"input_len={PROMPT}", f"output_len={ANSWER}"]
        told = planned("serve", str(folder), *words, *sizes)
        serve = [sys.executable, __file__, "--serve", str(folder), *words]
        taken = json.loads(output(serve))
        # The first start compiles, which takes memory that later ones do not.
        taken = json.loads(output(serve)) if taken["compiled"] else taken
        return told["memory_bytes"]["total"], taken["memory"], told["rates"][-1]["step_seconds"], taken["step"]

    return [(f"{Path(name).name}, {count} at a time", lambda n=name, c=count: pair(n, c)) for name, count in ENGINES]


def write_model(name: str, folder: str) -> None:
    """A folder with random weights in bfloat16."""
    from argosy.infer.load import random_lm
    from argosy.run.settings.recipe_files import preset_config

    preset, changes = MODELS[name]
    config: Any = preset_config(preset)
    if (experts := getattr(config, "moe", None)) is not None:
        changes = changes | {"moe": experts.model_copy(update=FEWER | ({"shared": 512} if getattr(experts, "shared", 0) else {}))}
    random_lm(config.model_copy(update=changes), 0).save(folder, format="hub", dtype="bfloat16")


def serve(folder: str, *words: str) -> None:
    """Prints the memory of an engine, and the time of its steps in which all sequences decode."""
    import jax
    import numpy as np

    from argosy.core.process.resident import trim
    from argosy.core.settings import read_settings, words_layer
    from argosy.infer.engine.engine import Engine
    from argosy.infer.engine.request import Request
    from argosy.infer.load import load_lm
    from argosy.jobs.machine import programs_folder, start_jax
    from argosy.jobs.plan.serving import ServePlanSettings
    from argosy.observe.memory import resident_bytes
    from argosy.ops.programs.store import open_store

    settings = read_settings(ServePlanSettings, words_layer(list(words))).value.engine
    start_jax()
    jax.devices()
    lm = load_lm(folder)
    engine = Engine(lm.module, settings, exclusive=True, origin=lm.origin)
    engine.warm_up(open_store(programs_folder()))
    trim()
    draw, steps = np.random.default_rng(0), []
    for _ in range(2):
        for prompt in draw.integers(0, engine.vocab, (settings.slots, PROMPT)).tolist():
            engine.add(Request(prompt, ANSWER))
        while engine.busy:
            before, began = engine.stats.prompt_tokens, time.perf_counter()
            engine.step()
            if engine.stats.prompt_tokens == before and len(engine.scheduler.running) == settings.slots:
                steps.append(time.perf_counter() - began)
    steps.sort()
    found = {"memory": resident_bytes(), "step": steps[len(steps) // 10], "median": median(steps)}
    print(json.dumps(found | {"compiled": engine.stats.compilations}))


# ---------------------------------------------------------------- pairs


def planned(*words: str) -> dict[str, Any]:
    return json.loads(output([*ARGOSY, "plan", *words, "--json"]))


def output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1] if "--serve" in command else done.stdout


def main(*words: str) -> None:
    turns = next((int(word[6:]) for word in words if word.startswith("turns=")), 3)
    groups = [word for word in words if "=" not in word] or [*GROUPS]
    print(f"{'shape':60} {'memory MB':>18} {'off':>6} {'ms a step':>18} {'off':>6}")
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups:
            for shape, pair in GROUPS[group](Path(scratch)):
                need, used, step, taken = (median(column) for column in zip(*(pair() for _ in range(turns)), strict=True))
                memory, speed = f"{need / 1e6:.0f} / {used / 1e6:.0f}", f"{1000 * step:.2f} / {1000 * taken:.2f}"
                print(f"{shape:60} {memory:>18} {need / used - 1:>+6.0%} {speed:>18} {step / taken - 1:>+6.0%}", flush=True)


GROUPS = {"engine": engine_shapes}

if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or ["engine"]
    if kind == "--write":
        write_model(*rest)
    elif kind == "--serve":
        serve(*rest)
    else:
        main(kind, *rest)
