"""GRPO and PPO on sums: does the greedy accuracy on sums never seen rise, over several seeds?

    ./run python bench/reinforce_cpu.py [STEPS] [SEEDS] [RECIPE ...] [svg=docs/images/reinforcement.svg]

stories260K is fine-tuned on a part of the sums of two numbers up to 29 until it gets about half of the others right. From there it
learns from rewards alone: 1 for the right sum, 0 otherwise, on prompts of the sums that fine-tuning did not see; a fifth of all sums is
kept for the test. Printed for each recipe: greedy accuracy on the test before and after, mean and 95 % interval (Student's t) over
the seeds, the reward of the first and last five rollouts, and seconds of a run. The learning rates are those of a model of this size.
With `svg=` the greedy accuracy on the test every 20 steps is drawn, again with its interval.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from curves import draw, picture_of
from seeds import spread

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

SHARED = Path(__file__).parents[2] / "shared" / "data"
MODEL = SHARED / "models" / "stories260k"
LARGEST, TOKENS, STEPS, SEEDS, EVERY = 29, 6, 120, 5, 20
# Of fine-tuning: rows of 32 tokens hold two or three sums.
TUNING = ["optimizer.learning_rate=2e-3", "steps=400", "data.sequence=32", "data.batch=32", "eval.batches=0", "log.every=100"]
COMMON = [f"rollout.tokens={TOKENS}", "data.sequence=32", "eval.batches=0", "data.held_out=0", f"checkpoint.every={EVERY}"]
COMMON += ["checkpoint.keep=1000"]
RECIPES = {
    "grpo": ["data.batch=128", "rollout.completions=8", "optimizer.learning_rate=2e-4"],
    "ppo": ["data.batch=128", "rollout.epochs=2", "optimizer.learning_rate=2e-4", "objective.kl=0.01"],
}
REWARD = """
def right(completions, answer):
    return [float(text.strip() == one) for text, one in zip(completions, answer)]
"""


def sums() -> tuple[list[Any], list[Any], list[Any]]:
    """Sums to fine-tune on, to ask about, and to test with."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(0).shuffle(rows)
    test, rest = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    return rest[: len(rest) // 2], rest[len(rest) // 2 :], test


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def accuracy(model: str, test: list[Any]) -> float:
    """The share of greedy answers that are the sum and end there."""
    lm = argosy.load(model)
    completions = lm.generate([row["prompt"] for row in test], TOKENS)
    right = [a.text.strip() == row["answer"] and a.finish_reason == "stop" for a, row in zip(completions, test, strict=True)]
    return float(np.mean(right))


def main() -> None:
    picture, words = picture_of(sys.argv[1:])
    steps, seeds = (int(words[i]) if len(words) > i else default for i, default in enumerate((STEPS, SEEDS)))
    recipes = words[2:] or list(RECIPES)
    curves: dict[str, list[dict[int, float]]] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        tuning, asking, test = sums()
        (folder / "reward.py").write_text(REWARD)
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in tuning]
        words = [f"model={MODEL}", f"data.source={written(folder / 'tuning.jsonl', rows)}", f"data.cache={folder / 'cache'}"]
        argosy.fit("sft", *words, *TUNING, f"dir={folder / 'base'}")
        before = accuracy(str(folder / "base"), test)
        print(f"{len(tuning)} sums fine-tuned, {len(asking)} asked, {len(test)} tested: accuracy {before:.3f} before\n")
        print("| recipe | updates | accuracy after | least, most | reward, first and last rollouts | seconds |")
        print("|---|---|---|---|---|---|")
        prompts = written(folder / "asking.jsonl", asking)
        for recipe in recipes:
            after, first, last, seconds = [], [], [], []
            for seed in range(seeds):
                run = folder / f"{recipe}-{seed}"
                words = [f"model={folder / 'base'}", f"data.source={prompts}", f"reward={folder / 'reward.py'}:right", f"seed={seed}"]
                start = time.monotonic()
                argosy.fit(recipe, *words, *COMMON, *RECIPES[recipe], f"steps={steps}", f"dir={run}")
                seconds.append(time.monotonic() - start)
                rewards = list(by_step(read(Store(run)), "reward").values())
                first.append(float(np.mean(rewards[:5])))
                last.append(float(np.mean(rewards[-5:])))
                after.append(accuracy(str(run), test))
                if picture is not None:
                    accuracies = {step: accuracy(str(run / "checkpoints" / str(step)), test) for step in range(EVERY, steps, EVERY)}
                    curves.setdefault(recipe, []).append({0: before} | accuracies | {steps: after[-1]})
                    print(f"{recipe}, seed {seed}: {curves[recipe][-1]}, {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
                shutil.rmtree(run)
            cells = spread(after), f"{min(after):.3f}, {max(after):.3f}", f"{np.mean(first):.3f}, {np.mean(last):.3f}"
            print(f"| {recipe} | {steps} | {cells[0]} | {cells[1]} | {cells[2]} | {np.median(seconds):.0f} |", flush=True)
        if picture is not None:
            draw(picture, curves, "greedy accuracy by step", "accuracy on sums never seen")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
