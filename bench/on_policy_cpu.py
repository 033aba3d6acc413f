"""On-policy distillation beside distillation on given text: which student is nearer to its teacher at what it writes itself?

    ./run python bench/on_policy_cpu.py [STEPS]

The teacher is stories260K after 300 steps of fine-tuning on Shakespeare, the student stories260K itself, the prompts two lines of a
play, the data's answers the lines that follow. Equal steps, batches and learning rates; a tenth of the prompts is held out. Printed
for those:

    own kl       KL(teacher || student) at the student's own greedy answers, nats a token
    own rkl      KL(student || teacher) there
    given kl     KL(teacher || student) at the data's answers
    agreement    own tokens where both have the same likeliest token
    seconds      of the whole run, with compiling
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

SHARED = Path(__file__).parents[2] / "shared" / "data"
MODEL, TEXT = SHARED / "models" / "stories260k", SHARED / "text" / "tinyshakespeare.txt"
STEPS, TUNED = 100, 300
RUNS = {
    "given answers": ["objective.student_fraction=0"],
    "half of the batches its own": ["objective.student_fraction=0.5"],
    "its own answers": ["objective.student_fraction=1"],
    "its own answers, reverse": ["objective.student_fraction=1", "objective.divergence=reverse"],
    "its own answers, forward": ["objective.student_fraction=1", "objective.divergence=forward"],
    "the teacher's answers": ["objective.student_fraction=0", "objective.others=teacher"],
}


def prompts(folder: Path) -> Path:
    """Two lines, and what follows."""
    path, lines = folder / "lines.jsonl", [line for line in TEXT.read_text().splitlines() if line.strip()]
    rows = [{"prompt": "\n".join(lines[i : i + 2]) + "\n", "completion": "\n".join(lines[i + 2 : i + 4])} for i in range(0, 6000, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def last(run: Path, name: str) -> float:
    values = by_step(read(Store(run)), name)
    return values[max(values)] if values else float("nan")


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    folder = Path(tempfile.mkdtemp())
    try:
        teacher, data = folder / "teacher", prompts(folder)
        words = [f"data.source={TEXT}", "data.documents=paragraphs", "data.sequence=256", "data.packing=fit", "data.batch=16"]
        words += [f"steps={TUNED}", "optimizer.learning_rate=1e-3", f"data.cache={folder / 'cache'}", "eval.batches=0"]
        argosy.fit("sft", *words, f"model={MODEL}", f"dir={teacher}", "checkpoint.every=100000")
        common = [f"model={MODEL}", f"objective.teacher={teacher}", f"data.source={data}", "data.sequence=256", "data.held_out=0.1"]
        common += ["data.batch=32", "rollout.tokens=64", "eval.batches=4", "optimizer.learning_rate=3e-4", "checkpoint.every=100000"]
        heads = "| | own kl | own rkl | given kl | agreement | seconds |\n|---|---|---|---|---|---|"
        print(f"{steps} steps of 32 answers of at most 64 tokens\n\n{heads}", flush=True)
        untouched = {"untouched": ["objective.student_fraction=0", "optimizer.learning_rate=1e-12", "steps=1"]}
        for number, (name, words) in enumerate((untouched | RUNS).items()):
            where, start = folder / str(number), time.monotonic()
            run_words = [f"steps={steps}", f"eval.every={steps}", *words]
            argosy.fit("gkd", *common, *run_words, f"dir={where}")
            seconds = time.monotonic() - start
            # The same student once more, to be evaluated by the reverse divergence.
            again = ["objective.student_fraction=0", "objective.divergence=reverse"]
            again += ["optimizer.learning_rate=1e-12", "steps=1", "eval.every=1"]
            argosy.fit("gkd", *common, *again, f"init.weights={where}", f"dir={where}.again")
            metrics = [last(where, f"eval_{name}") for name in ("kl", "given_kl", "agreement")]
            reverse = last(Path(f"{where}.again"), "eval_loss")
            print(f"| {name} | {metrics[0]:.3f} | {reverse:.3f} | {metrics[1]:.3f} | {metrics[2]:.3f} | {seconds:.0f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
