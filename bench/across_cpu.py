"""Distillation across tokenizers, on given text and on the student's own: which student writes what its teacher finds likely?

    ./run python bench/across_cpu.py [STEPS] [RUN ...]

The teacher is stories260K (512 tokens, SentencePiece). The student has 512 tokens of its own (byte-level BPE, trained on the text) and
has learned a sample of the teacher's stories from labels. Prompts are first sentences of paragraphs, the data's answers what follows; a
tenth is held out. Equal steps, batches and learning rates; labels count only where they are said to. Printed for held-out prompts:

    given ce     cross-entropy of the data's answers, nats of the student's tokens
    given uld    distance from the teacher there; a hybrid one is another measure
    own uld      distance at the student's own greedy answers, with the share of their tokens that is aligned
    nats a byte  how unlikely the teacher finds answers that the student samples, and how many bytes they have
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

SHARED = Path(__file__).parents[2] / "shared" / "data"
TEACHER, TEXT = SHARED / "models" / "stories260k", SHARED / "text" / "tinystories_sample.txt"
STEPS, BASE, PROMPTS, SAMPLES = 60, 400, 64, 4
STUDENT = [
    "model.family=llama", "model.vocab=512", "model.width=48", "model.layers=3", "model.heads=4", "model.kv_heads=4", "model.ffn=128",
    "model.context=256", "model.tied=true",
]  # fmt: skip
RUNS = {
    "labels": ["objective.student_fraction=0", "objective.cross_entropy=1", "objective.weight=1e-9"],
    "given": ["objective.student_fraction=0"],
    "given, hybrid": ["objective.student_fraction=0", "objective.hybrid=true"],
    "own": ["objective.student_fraction=1"],
    "own, hybrid": ["objective.student_fraction=1", "objective.hybrid=true"],
    "own, hybrid, beta 0": ["objective.student_fraction=1", "objective.hybrid=true", "objective.beta=0"],
    "half own": ["objective.student_fraction=0.5"],
    "half own, hybrid": ["objective.student_fraction=0.5", "objective.hybrid=true"],
    "half own, hybrid, labels": ["objective.student_fraction=0.5", "objective.hybrid=true", "objective.cross_entropy=1"],
}


def records(folder: Path) -> tuple[Path, list[str]]:
    """First sentences with what follows, and the prompts of the last of them, which are in no file."""
    paragraphs = [text.replace("\n", " ").strip() for text in TEXT.read_text(encoding="utf-8").split("\n\n")]
    cut = [text.split(". ", 1) for text in paragraphs if ". " in text]
    rows = [{"prompt": f"{first}.", "completion": f" {rest[:80]}"} for first, rest in cut if 10 < len(first) < 100]
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:-PROMPTS]), encoding="utf-8")
    return path, [row["prompt"] for row in rows[-PROMPTS:]]


def last(run: Path, name: str) -> float:
    values = by_step(read(Store(run)), name)
    return values[max(values)] if values else float("nan")


def judged(run: Path, prompts: list[str]) -> tuple[float, float]:
    """Nats a byte of sampled answers by the teacher, and bytes of an answer."""
    student, teacher = argosy.load(str(run)), argosy.load(str(TEACHER))
    sampled = [student.generate(prompts, max_tokens=48, temperature=1.0, seed=seed) for seed in range(SAMPLES)]
    completions = [completion.text for group in sampled for completion in group]
    texts = [prompt + completion for prompt, completion in zip(prompts * SAMPLES, completions)]
    whole, prompt_scores = teacher.score(texts), teacher.score(prompts * SAMPLES)
    size = sum(len(text.encode()) for text in completions)
    return -sum(float(a.sum() - b.sum()) for a, b in zip(whole, prompt_scores)) / max(size, 1), size / len(completions)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    runs = {name: RUNS[name] for name in sys.argv[2:]} or RUNS
    folder = Path(tempfile.mkdtemp())
    try:
        tokenizer, base, (data, prompts) = folder / "tokenizer", folder / "base", records(folder)
        command = ["./run", "data", "tokenizer", str(TEXT), str(tokenizer), "vocab=512"]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
        words = [f"data.tokenizer={tokenizer}", f"data.source={data}", "data.held_out=0.1", "data.sequence=128", "data.batch=16"]
        words += [f"data.cache={folder / 'cache'}", "eval.batches=4", "checkpoint.every=100000", "log.every=50"]
        base_words = ["objective=next_token", "data.packing=fit", "data.learn=all", "optimizer=adamw", "optimizer.learning_rate=3e-3"]
        argosy.fit("tiny", *words, *STUDENT, *base_words, "schedule=cosine", f"steps={BASE}", f"dir={base}", f"eval.every={BASE}")
        heads = "| | given ce | given uld | own uld | aligned | nats a byte | bytes | seconds |\n|---|---|---|---|---|---|---|---|"
        print(f"{steps} steps of 16 answers of at most 48 tokens\n\n{heads}", flush=True)
        words += ["rollout.tokens=48"]
        words += [f"objective.teacher={TEACHER}", "optimizer.learning_rate=3e-4", f"init.weights={base}"]
        still = ["objective.student_fraction=0", "optimizer.learning_rate=1e-12", "steps=1", "eval.every=1"]
        words += ["objective.hybrid=false"]
        untouched = {"untouched": still, "untouched, hybrid": [*still, "objective.hybrid=true"]}
        for number, (name, run_words) in enumerate((untouched | runs).items()):
            where, start = folder / str(number), time.monotonic()
            argosy.fit("gold", *words, *STUDENT, f"steps={steps}", f"eval.every={steps}", *run_words, f"dir={where}")
            seconds = time.monotonic() - start
            metrics = [last(where, f"eval_{kind}") for kind in ("given_cross_entropy", "given_uld", "uld", "aligned")]
            nats, size = judged(where, prompts)
            print(f"| {name} | {' | '.join(f'{each:.3f}' for each in metrics)} | {nats:.3f} | {size:.0f} | {seconds:.0f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
