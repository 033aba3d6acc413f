"""LoRA beside full fine-tuning on the same data: the loss of held-out answers, with its standard error.

    ./run python bench/finetuning_cpu.py [STEPS] [SEEDS] [MODEL]

The 1,100 instructions of ../shared/data, 100 of them held out; stories260K, or the model of a folder. Of each way the learning rates
below are tried with the first seed, and the best of them with the others. Printed is the mean cross-entropy of a token of the held-out
answers: the mean over seeds, the standard error of that mean over the answers, and the difference to full fine-tuning with the standard
error of the differences, which is smaller because both answer the same questions.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import argosy
from argosy.data.batch import Field
from argosy.data.pipeline import build, tokenizer_for
from argosy.data.settings import DataSettings
from argosy.train.objectives.preferences.sequences import FIELDS

SHARED = Path(__file__).parents[2] / "shared" / "data"
MODEL, DATA = SHARED / "models" / "stories260k", SHARED / "instruct" / "instruction_1100.jsonl"
HELD_OUT, STEPS, SEEDS, SEQUENCE, BATCH = 100, 200, 3, 192, 4
LORA = ["adapter=lora", "adapter.rank=16"]
# Of stories260K; one rate each of larger models, that of the recipe and ten times it for so few steps.
WAYS = {
    "full": ([], (1e-3,)),
    "LoRA, rank 16": (LORA, (1e-3, 3e-3)),
    "LoRA, embedding and norms in full": ([*LORA, "adapter.train=[embed, .*norm]"], (1e-3,)),
    "LoRA, dropout 0.1": ([*LORA, "adapter.dropout=0.1"], (1e-3,)),
}
LARGER = {"full": ([], (2e-5, 1e-4)), "LoRA, rank 16": (LORA, (2e-4, 1e-3))}


def files(folder: Path, chat: bool) -> tuple[Path, Path]:
    """Training data and held-out data: conversations for a model with a chat template, texts for one without. Held-out answers are the
    chosen ones of preference pairs, because those are kept apart in their corpus."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    prompts = [f"{row['instruction']}\n{row['input']}".strip() for row in rows]
    if chat:
        train = [{"messages": [said("user", a), said("assistant", row["output"])]} for a, row in zip(prompts, rows)]
        no = [said("assistant", "no")]
        right = [[said("assistant", row["output"])] for row in rows]
        test = [{"prompt": [said("user", a)], "chosen": answer, "rejected": no} for a, answer in zip(prompts, right)]
    else:
        train = [{"prompt": f"{a}\n", "completion": row["output"]} for a, row in zip(prompts, rows)]
        test = [{"prompt": f"{a}\n", "chosen": row["output"], "rejected": "no"} for a, row in zip(prompts, rows)]
    files = {"train.jsonl": train[:-HELD_OUT], "test.jsonl": test[-HELD_OUT:]}
    for name, some in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return tuple(folder / name for name in files)  # type: ignore[return-value]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def held_out(path: Path, model: Path, folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """The held-out answers as tokens: ids, and whether each counts."""
    settings = DataSettings(source=str(path), tokenizer=str(model), sequence=SEQUENCE, batch=2, held_out=0, cache=str(folder))
    vocab = argosy.load(model).config.vocab
    fields = {**FIELDS, "document": Field("B s", np.int32, "row")}
    batches: Any = build(settings, tokenizer_for(settings), vocab=vocab, seed=0, fields=fields, rows_per_group=2)
    corpus, groups = batches.table.rows.corpus, batches.table.rows.groups
    batches.close()
    spans = [slice(corpus.starts[2 * group], corpus.starts[2 * group + 1]) for group in groups]
    return [(corpus.tokens[span].tolist(), np.array(corpus.weights[span])) for span in spans]


def losses(model: Path, test: list[tuple[list[int], np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of cross-entropies of each answer's tokens, and their number."""
    scores = argosy.load(model).score([ids for ids, _ in test])
    sums = [-float(score[weights[1:] > 0].sum()) for score, (_, weights) in zip(scores, test)]
    return np.array(sums), np.array([int((weights[1:] > 0).sum()) for _, weights in test])


def mean(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """The mean of a token and its standard error over answers, for a ratio of sums."""
    value = sums.sum() / counts.sum()
    return value, float(np.sqrt(np.sum((sums - value * counts) ** 2)) / counts.sum())


def main() -> None:
    steps, seeds = (int(word) for word in [*sys.argv[1:3], *map(str, (STEPS, SEEDS)[len(sys.argv[1:3]) :])])
    model = Path(sys.argv[3]) if len(sys.argv) > 3 else MODEL
    ways = WAYS if model == MODEL else LARGER
    folder = Path(tempfile.mkdtemp())
    try:
        train, test_file = files(folder, chat=model != MODEL)
        test = held_out(test_file, model, folder / "cache")
        before, counts = losses(model, test)
        print(f"{model.name}: {len(test)} held-out answers, {steps} steps of {BATCH} x {SEQUENCE} tokens, {seeds} seeds\n")
        print("| | rate | held-out loss | more than full | seconds a run |\n|---|---|---|---|---|")
        print("| before | | {:.3f} ± {:.3f} | | |".format(*mean(before, counts)), flush=True)
        full = None
        for name, (words, rates) in ways.items():

            def trained(rate: float, seed: int, name: str = name, words: list[str] = words) -> tuple[np.ndarray, float]:
                run, start = folder / f"{name} {rate} {seed}", time.monotonic()
                common = [f"model={model}", f"data.source={train}", f"data.sequence={SEQUENCE}", f"data.batch={BATCH}"]
                common += [f"steps={steps}", f"seed={seed}", "eval.batches=0", "data.held_out=0", f"optimizer.learning_rate={rate}"]
                common += [f"data.cache={folder / 'cache'}", f"dir={run}", "log.every=20", "checkpoint.every=100000"]
                argosy.fit("sft", *common, *words)
                took = time.monotonic() - start
                run_losses = losses(run, test)[0]
                shutil.rmtree(run)
                return run_losses, took

            tried = {rate: trained(rate, 0) for rate in rates}
            for rate, (sums, took) in tried.items():
                print(f"| {name}, first seed | {rate:g} | {mean(sums, counts)[0]:.3f} | | {took:.0f} |", flush=True)
            best = min(tried, key=lambda rate: tried[rate][0].sum())
            runs = [tried[best], *(trained(best, seed) for seed in range(1, seeds))]
            sums = np.mean([run for run, _ in runs], 0)
            full = sums if full is None else full
            apart = "" if sums is full else "{:+.3f} ± {:.3f}".format(*mean(sums - full, counts))
            each = ", ".join(f"{mean(run, counts)[0]:.3f}" for run, _ in runs)
            figures = "{:.3f} ± {:.3f}".format(*mean(sums, counts))
            print(f"| **{name}** | {best:g} | {figures} ({each}) | {apart} | {np.mean([t for _, t in runs]):.0f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
