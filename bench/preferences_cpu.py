"""DPO, KTO and ORPO on a small model and real pairs: is the chosen answer preferred afterwards, and is it still likely?

    ./run python bench/preferences_cpu.py [STEPS] [SEEDS] [MODEL] [RUN ...]

stories260K on the 1,100 pairs of ../shared/data (polite against rude answers to instructions), a tenth of them held out. For KTO each
training pair is two labeled examples. Printed for the held-out pairs, before and after, as means over the seeds with their 95 %
interval (Student's t):

    accuracy     pairs whose chosen answer gained more log-probability than the rejected one, against the first weights; 0.5 by chance
    likelier     pairs whose chosen answer has the higher log-probability a token
    chosen, rejected   mean log-probability of an answer; the collapse of DPO is both falling together
    wall, CPU    median seconds of a run, with compiling

The held-out pairs are the same for all seeds. At stories260K's learning rates, which are far above those of the recipes. Half a minute
to a minute a run on two free cores. The model of a folder is trained by adapters, at the rates of `LARGER`, with half the batch and its
chat template.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from seeds import spread

import argosy
from argosy.data.batch import Field
from argosy.data.pipeline import build, tokenizer_for
from argosy.data.settings import DataSettings
from argosy.train.objectives.preferences.sequences import FIELDS

SHARED = Path(__file__).parents[2] / "shared" / "data"
MODEL, PAIRS = SHARED / "models" / "stories260k", SHARED / "preference" / "preference_1100.jsonl"
HELD_OUT, STEPS, SEEDS, SEQUENCE = 110, 60, 3, 192
RUNS = {
    "dpo": ("dpo", ["optimizer.learning_rate=3e-4"]),
    "dpo, sigmoid 1 + sft 0.5": ("dpo", ["optimizer.learning_rate=3e-4", "objective.losses.sigmoid=1", "objective.losses.sft=0.5"]),
    "dpo, ipo": ("dpo", ["optimizer.learning_rate=3e-4", "objective.losses.ipo=1"]),
    "kto": ("kto", ["optimizer.learning_rate=3e-4"]),
    "orpo": ("orpo", ["optimizer.learning_rate=1e-3"]),
}
LORA = ["adapter=lora", "adapter.rank=16", "data.batch=8"]
LARGER = {name: (name, [*LORA, f"optimizer.learning_rate={rate}"]) for name, rate in (("dpo", 1e-4), ("kto", 1e-4), ("orpo", 3e-4))}


def files(folder: Path) -> tuple[Path, Path, Path]:
    """Training pairs, the same as labeled examples, and held-out pairs."""
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    pairs = [{name: row[name] for name in ("instruction", "input", "chosen", "rejected")} for row in rows]
    labeled = []
    for row in pairs[:-HELD_OUT]:
        prompt = f"{row['instruction']}\n{row['input']}\n"
        labeled += [{"prompt": prompt, "completion": row[name], "label": name == "chosen"} for name in ("chosen", "rejected")]
    plain = [{"prompt": f"{r['instruction']}\n{r['input']}\n", "chosen": r["chosen"], "rejected": r["rejected"]} for r in pairs]
    files = {"train.jsonl": plain[:-HELD_OUT], "labeled.jsonl": labeled, "test.jsonl": plain[-HELD_OUT:]}
    for name, some in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    return tuple(folder / name for name in files)  # type: ignore[return-value]


def held_out(path: Path, folder: Path, model: Path) -> Any:
    """The held-out pairs as tokens: [(ids, whether each counts)], chosen and rejected by turns."""
    settings = DataSettings(source=str(path), tokenizer=str(model), sequence=SEQUENCE, batch=2, held_out=0, cache=str(folder))
    fields = {**FIELDS, "document": Field("B s", np.int32, "row")}
    vocab = argosy.load(model).config.vocab
    batches = build(settings, tokenizer_for(settings), vocab=vocab, seed=0, fields=fields, rows_per_group=2)
    corpus, groups = batches.table.rows.corpus, batches.table.rows.groups  # type: ignore[attr-defined]
    batches.close()
    documents = [2 * group + place for group in groups for place in range(2)]
    spans = [slice(corpus.starts[d], corpus.starts[d + 1]) for d in documents]
    return [(corpus.tokens[span].tolist(), corpus.weights[span]) for span in spans]


def measured(model: str, test: Any) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each answer, and per token: [pairs 2]."""
    lm = argosy.load(model)
    scores = lm.score([ids for ids, _ in test])
    sums = np.array([score[weights[1:] > 0].sum() for score, (_, weights) in zip(scores, test)]).reshape(-1, 2)
    return sums, sums / np.array([(weights > 0).sum() for _, weights in test]).reshape(-1, 2)


def main() -> None:
    steps, seeds = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, STEPS), (2, SEEDS)))
    model = Path(sys.argv[3]) if len(sys.argv) > 3 else MODEL
    runs = RUNS if model.resolve() == MODEL.resolve() else LARGER
    selected = {name: runs[name] for name in sys.argv[4:]} or runs
    folder = Path(tempfile.mkdtemp())
    try:
        train, labeled, test_file = files(folder)
        test = held_out(test_file, folder / "cache", model)
        first, first_means = measured(str(model), test)
        print(f"{model.name}: {len(first)} held-out pairs, {steps} steps, {seeds} seeds\n")
        print("| | accuracy | likelier | chosen | rejected | wall s | CPU s |\n|---|---|---|---|---|---|---|")
        row = np.mean(first_means[:, 0] > first_means[:, 1]), *first.mean(0)
        print(f"| before | | {row[0]:.3f} | {row[1]:.1f} | {row[2]:.1f} | | |", flush=True)
        for name, (recipe, words) in selected.items():
            figures: list[list[float]] = []
            for seed in range(seeds):
                data, run = labeled if recipe == "kto" else train, folder / f"{name} {seed}"
                common = [f"model={model}", f"data.source={data}", f"data.sequence={SEQUENCE}", "data.batch=16", f"steps={steps}"]
                common += [f"seed={seed}", "eval.batches=0", f"data.cache={folder / 'cache'}", f"dir={run}", "log.every=20"]
                wall, cpu = time.monotonic(), time.process_time()
                argosy.fit(recipe, *common, *words)
                wall, cpu = time.monotonic() - wall, time.process_time() - cpu
                sums, means = measured(str(run), test)
                gained = sums - first
                better = float(np.mean(gained[:, 0] > gained[:, 1])), float(np.mean(means[:, 0] > means[:, 1]))
                figures.append([*better, *map(float, sums.mean(0)), wall, cpu])
                print(f"{name}, seed {seed}: {' '.join(f'{value:.3f}' for value in figures[-1])}", file=sys.stderr, flush=True)
                shutil.rmtree(run)
            columns = [list(values) for values in zip(*figures)]
            cells = [spread(values, digits) for values, digits in zip(columns[:4], (3, 3, 1, 1))]
            cells += [f"{np.median(values):.0f}" for values in columns[4:]]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
