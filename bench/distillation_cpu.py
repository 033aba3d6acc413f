"""A small student with random weights learns from text alone, and from text with a teacher: which predicts held-out text better?

    ./run python bench/distillation_cpu.py [STEPS]

The teacher is stories260K, the text a sample of the stories that it was trained on (../shared/data), of which a tenth is held out by
paragraphs. Equal steps, batches and learning rates. Printed for the held-out paragraphs, as means of two seeds:

    loss         cross-entropy of the next token, nats
    kl           KL(teacher || student), nats a token; of cached distributions that over 64 tokens and the rest
    agreement    targets where both have the same likeliest token
    seconds      of the whole run, with compiling, and with what is computed before its first step

The runs from labels report no divergence.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

SHARED = Path(__file__).parents[2] / "shared" / "data"
TEACHER, TEXT = SHARED / "models" / "stories260k", SHARED / "text" / "tinystories_sample.txt"
STEPS, SEEDS = 400, (0, 1)
STUDENT = [
    "model.family=llama", "model.vocab=512", "model.width=48", "model.layers=3", "model.heads=4", "model.kv_heads=4", "model.ffn=128",
    "model.context=512", "model.tied=true",
]  # fmt: skip
SOFT = ["objective=distill", f"objective.teacher={TEACHER}"]
RUNS = {
    "labels": ["objective=next_token"],
    "half labels, half forward": [*SOFT],
    "forward": [*SOFT, "objective.cross_entropy=0"],
    "forward, temperature 2": [*SOFT, "objective.cross_entropy=0", "objective.temperature=2"],
    "reverse": [*SOFT, "objective.cross_entropy=0", "objective.divergence=reverse"],
    "jsd, beta 0.5": [*SOFT, "objective.cross_entropy=0", "objective.divergence=jsd"],
    "half labels, half forward, cached": [*SOFT, "objective.logits=cached"],
}


def common(steps: int, folder: Path) -> list[str]:
    words = [f"data.tokenizer={TEACHER}", f"data.source={TEXT}", "data.documents=paragraphs", "data.held_out=0.1", "data.sequence=128"]
    words += ["data.packing=fit", "data.batch=16", f"data.cache={folder / 'cache'}", f"steps={steps}", "log.every=50"]
    words += [f"eval.every={steps}", "eval.batches=99", "optimizer=adamw", "optimizer.learning_rate=3e-3", "schedule=cosine"]
    return [*words, "schedule.warmup=20", "checkpoint.every=100000"]


def last(run: Path, name: str) -> float:
    found = by_step(read(Store(run)), name)
    return found[max(found)] if found else float("nan")


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    folder = Path(tempfile.mkdtemp())
    try:
        print(f"{steps} steps of 2,048 tokens\n\n| | loss | kl | agreement | seconds |\n|---|---|---|---|---|")
        where = folder / "teacher"
        # Its own loss: no learning at all.
        argosy.fit("sft", *common(1, folder), f"model={TEACHER}", "optimizer.learning_rate=1e-12", f"dir={where}")
        print(f"| the teacher | {last(where, 'eval_loss'):.4f} | | | |", flush=True)
        for number, (name, words) in enumerate(RUNS.items()):
            found, seconds = [], []
            for seed in SEEDS:
                where, began = folder / f"{number}.{seed}", time.monotonic()
                argosy.fit("tiny", *common(steps, folder), *STUDENT, *words, f"seed={seed}", f"dir={where}")
                seconds.append(time.monotonic() - began)
                found.append([last(where, f"eval_{name}") for name in ("loss", "kl", "agreement")])
            loss, kl, agreement = np.mean(found, 0)
            more = " | " if np.isnan(kl) else f"{kl:.4f} | {agreement:.3f}"
            print(f"| {name} | {loss:.4f} | {more} | {np.mean(seconds):.0f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
