"""What `argosy plan` predicts for this machine, beside what is taken here.

    ./run python bench/plan_here.py [GROUP ...] [turns=3]     groups: training, adapters, rollouts, engine; all by default

Each shape is planned and run in turn, each in a process of its own, as often as `turns` says; a row has the medians. Taken is the
resident memory (of training its largest, of the engine after two rounds that fill its cache), and the step that a tenth of all are
faster than: other processes slow a step, and never speed it up. Of rollouts the time is that of sampling one. Engines find their
programs on disk, as at a second start.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

# Predicted and taken memory in bytes, then predicted and taken seconds.
Pair = Callable[[], tuple[float, float, float, float]]
ARGOSY = [sys.executable, "-c", "from argosy.cli import main; raise SystemExit(main())"]
PROMPT, ANSWER = 128, 128
# A process with room keeps what it frees, which makes it faster and says nothing of its needs.
FRUGAL = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
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

# Recipes and settings of runs that train on random tokens.
TRAINED = (
    ("tiny",),
    ("tiny", "data.batch=32"),
    ("tiny", "model.width=128", "model.ffn=352", "model.layers=4"),
    ("tiny", "model.width=256", "model.ffn=704", "model.layers=4", "data.batch=16"),
    ("tiny", "model.width=256", "model.ffn=704", "model.layers=8", "execution.remat=full"),
    ("tiny", "model.width=384", "model.ffn=1024", "model.layers=6", "data.sequence=256"),
    ("tiny", "model.width=512", "model.ffn=1408", "model.layers=4", "accumulate=2"),
    ("tiny", "model.width=512", "model.ffn=1408", "model.layers=8"),
    ("bench-31m",),
    ("bench-31m", "data.batch=4", "execution.remat=dots"),
)
# Of adapters: those of four layers of SmolLM2.
ADAPTERS = ("lora", "qlora", "dora")
SFT = ("data.source=synthetic", "data.sequence=256", "data.batch=4")
# Of rollouts: the room for a prompt; and the trained model, completions and their tokens.
PROMPTS = 96
ROLLOUTS = ((str(STORIES), 32, 64), ("smollm2", 16, 64))


# ---------------------------------------------------------------- training


def trained(recipe: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The largest resident memory of a run of 12 steps, and its lines of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        more = ["steps=12", "log.every=1", "eval.batches=0", f"dir={folder}/run", "checkpoint.every=1000"]
        with open(f"{folder}/log.txt", "wb") as log:
            command = [*ARGOSY, "train", recipe, *words, *more]
            child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | FRUGAL)
            status, usage = os.wait4(child.pid, 0)[1:]
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(Path(folder, "log.txt").read_text(encoding="utf-8")[-2000:])
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return usage.ru_maxrss * 1024, [line for line in lines if "tokens_per_s" in line]


def training_pair(recipe: str, *words: str) -> tuple[float, float, float, float]:
    prediction = planned(recipe, *words)
    used, lines = trained(recipe, *words)
    times = sorted(prediction["tokens_per_step"] / line["tokens_per_s"] for line in lines[1:])
    return prediction["memory_bytes"]["total"], used, prediction["step_seconds"], times[len(times) // 10]


def training_shapes(scratch: Path) -> list[tuple[str, Pair]]:
    return [(" ".join(shape), lambda s=shape: training_pair(*s, "data.source=synthetic")) for shape in TRAINED]


def adapter_shapes(scratch: Path) -> list[tuple[str, Pair]]:
    def pair(kind: str) -> tuple[float, float, float, float]:
        return training_pair("sft", f"model={model_folder('smollm2', scratch)}", f"adapter={kind}", *SFT)

    return [(f"sft smollm2 adapter={kind}", lambda k=kind: pair(k)) for kind in ADAPTERS]


def rollout_shapes(scratch: Path) -> list[tuple[str, Pair]]:
    """The time is that of a rollout: its prompts and its completions."""
    prompts, reward = scratch / "prompts.jsonl", scratch / "reward.py"
    text = "Once upon a time there was a little girl who had {} red apples and a dog, and she"
    prompts.write_text("".join(json.dumps({"prompt": text.format(i)}) + "\n" for i in range(64)), encoding="utf-8")
    reward.write_text("def length(completions, **_):\n    return [float(len(str(one)) % 7) for one in completions]\n", encoding="utf-8")

    def pair(name: str, count: int, tokens: int) -> tuple[float, float, float, float]:
        sizes = [f"data.batch={count}", f"rollout.tokens={tokens}", f"data.sequence={tokens + PROMPTS}", "rollout.ignore_eos=true"]
        words = [f"model={model_folder(name, scratch)}", *sizes, "eval.before=false", "init.tokenizer_mismatch=allow"]
        prediction = planned("grpo", *words)
        used, lines = trained("grpo", *words, f"data.source={prompts}", f"reward={reward}:length")
        times = sorted(line["generate_s"] for line in lines[1:])
        rollout = prediction["rollouts"]
        need = max(prediction["memory_bytes"]["total"], rollout["memory_bytes"]["total"])
        return need, used, rollout["seconds"], times[len(times) // 10]

    return [(f"grpo {Path(name).name}, {n} x {tokens}", lambda a=(name, n, tokens): pair(*a)) for name, n, tokens in ROLLOUTS]


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a model, written at its first use."""
    folder = scratch / name if name in MODELS else Path(name)
    if not folder.exists():
        subprocess.run([sys.executable, __file__, "--write", name, str(folder)], check=True, capture_output=True)
    return folder


# ---------------------------------------------------------------- the engine


def engine_shapes(scratch: Path) -> list[tuple[str, Pair]]:
    def pair(name: str, count: int) -> tuple[float, float, float, float]:
        folder = model_folder(name, scratch)
        words = [f"engine.slots={count}", f"engine.pages={count * (PROMPT + ANSWER) // 16}", f"engine.context={PROMPT + ANSWER}"]
        sizes = [f"input_len={PROMPT}", f"output_len={ANSWER}"]
        prediction = planned("serve", str(folder), *words, *sizes)
        serve = [sys.executable, __file__, "--serve", str(folder), *words]
        measured = json.loads(output(serve))
        # The first start compiles, which takes memory that later ones do not.
        measured = json.loads(output(serve)) if measured["compiled"] else measured
        return prediction["memory_bytes"]["total"], measured["memory"], prediction["rates"][-1]["step_seconds"], measured["step"]

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
            before, start = engine.stats.prompt_tokens, time.perf_counter()
            engine.step()
            if engine.stats.prompt_tokens == before and len(engine.scheduler.running) == settings.slots:
                steps.append(time.perf_counter() - start)
    steps.sort()
    figures = {"memory": resident_bytes(), "step": steps[len(steps) // 10], "median": median(steps)}
    print(json.dumps(figures | {"compiled": engine.stats.compilations}))


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
                need, used, step, step_taken = (median(column) for column in zip(*(pair() for _ in range(turns)), strict=True))
                memory, speed = f"{need / 1e6:.0f} / {used / 1e6:.0f}", f"{1000 * step:.2f} / {1000 * step_taken:.2f}"
                print(f"{shape:60} {memory:>18} {need / used - 1:>+6.0%} {speed:>18} {step / step_taken - 1:>+6.0%}", flush=True)


GROUPS = {"training": training_shapes, "adapters": adapter_shapes, "rollouts": rollout_shapes, "engine": engine_shapes}

if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or [""]
    if kind == "--write":
        write_model(*rest)
    elif kind == "--serve":
        serve(*rest)
    else:
        main(*sys.argv[1:])
