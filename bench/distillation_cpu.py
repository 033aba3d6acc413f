"""A small student with random weights learns from text alone, and from text with a teacher: which predicts held-out text better?

    ./run python bench/distillation_cpu.py [STEPS] [SEEDS] [RUN ...] [svg=docs/images/distillation.svg]

The teacher is stories260K, the text a sample of the stories that it was trained on (../shared/data), of which a tenth is held out by
paragraphs. Equal steps, batches and learning rates. Printed for the held-out paragraphs, as means over the seeds, the loss with its
95 % interval (Student's t):

    loss         cross-entropy of the next token, nats
    less         by how much it is below that of labels alone with the same seed, which decides the first weights and the order of rows
    kl           KL(teacher || student), nats a token; of cached distributions that over 64 tokens and the rest
    agreement    targets where both have the same likeliest token
    seconds      of the whole run, with compiling, and with what is computed before its first step

The runs from labels report no divergence. With `svg=` the loss is drawn every eighth of the steps, for the runs of `DRAWN`.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from curves import draw, picture_of
from seeds import spread

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

SHARED = Path(__file__).parents[2] / "shared" / "data"
TEACHER, TEXT = SHARED / "models" / "stories260k", SHARED / "text" / "tinystories_sample.txt"
STEPS, SEEDS = 400, 3
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
    "half labels, half forward, relations": [
        *SOFT, *(f"objective.relations.{name}=1" for name in ("qq", "kk", "vv")), "objective.relation_heads=8",
    ],
    "half labels, half forward, relations 0.1": [
        *SOFT, *(f"objective.relations.{name}=0.1" for name in ("qq", "kk", "vv")), "objective.relation_heads=8",
    ],
    "half labels, half forward, hidden": [*SOFT, "objective.hidden=mse"],
    "half labels, half forward, cached": [*SOFT, "objective.logits=cached"],
}  # fmt: skip
# Their names in the picture: what is added to the labels.
DRAWN = {
    "labels": "labels",
    "half labels, half forward": "teacher",
    "half labels, half forward, hidden": "hidden",
    "half labels, half forward, relations 0.1": "relations 0.1",
    "half labels, half forward, relations": "relations 1",
}


def common(steps: int, folder: Path) -> list[str]:
    words = [f"data.tokenizer={TEACHER}", f"data.source={TEXT}", "data.documents=paragraphs", "data.held_out=0.1", "data.sequence=128"]
    words += ["data.packing=fit", "data.batch=16", f"data.cache={folder / 'cache'}", f"steps={steps}", "log.every=50"]
    words += [f"eval.every={max(1, steps // 8)}", "eval.batches=99"]
    words += ["optimizer=adamw", "optimizer.learning_rate=3e-3", "schedule=cosine"]
    return [*words, "schedule.warmup=20", "checkpoint.every=100000"]


def last(run: Path, name: str) -> float:
    values = by_step(read(Store(run)), name)
    return values[max(values)] if values else float("nan")


def main() -> None:
    picture, words = picture_of(sys.argv[1:])
    steps, seeds = (int(words[i]) if len(words) > i else default for i, default in enumerate((STEPS, SEEDS)))
    runs = {name: RUNS[name] for name in words[2:]} or RUNS
    curves: dict[str, list[dict[int, float]]] = {}
    labels: list[float] = []
    folder = Path(tempfile.mkdtemp())
    try:
        print(f"{steps} steps of 2,048 tokens\n\n| | loss | less | kl | agreement | seconds |\n|---|---|---|---|---|---|")
        where = folder / "teacher"
        # Its own loss: no learning at all.
        argosy.fit("sft", *common(1, folder), f"model={TEACHER}", "optimizer.learning_rate=1e-12", f"dir={where}")
        best = last(where, "eval_loss")
        print(f"| the teacher | {best:.3f} | | | | |", flush=True)
        for number, (name, words) in enumerate(runs.items()):
            metrics, seconds = [], []
            for seed in range(seeds):
                where, start = folder / f"{number}.{seed}", time.monotonic()
                argosy.fit("tiny", *common(steps, folder), *STUDENT, *words, f"seed={seed}", f"dir={where}")
                seconds.append(time.monotonic() - start)
                metrics.append([last(where, f"eval_{kind}") for kind in ("loss", "kl", "agreement")])
                if name in DRAWN:
                    curves.setdefault(DRAWN[name], []).append(by_step(read(Store(where)), "eval_loss"))
                print(f"{name}, seed {seed}: {metrics[-1]}, {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
            _, kl, agreement = np.mean(metrics, 0)
            losses = [each[0] for each in metrics]
            labels = losses if name == "labels" else labels
            less = spread([a - b for a, b in zip(labels, losses)]) if labels and name != "labels" else ""
            more = " | " if np.isnan(kl) else f"{kl:.4f} | {agreement:.3f}"
            print(f"| {name} | {spread(losses)} | {less} | {more} | {np.median(seconds):.0f} |", flush=True)
        if picture is not None:
            draw(picture, curves, "held-out loss by step", "held-out loss, nats a token", level=(best, "the teacher"))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
