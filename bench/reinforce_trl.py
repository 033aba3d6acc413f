"""A step of GRPO beside TRL's: the same model, prompts, numbers and lengths of answers, on this machine.

    ./run python bench/reinforce_trl.py MODEL TRL_PYTHON [STEPS]

MODEL: a Hub folder. TRL_PYTHON: the Python of an environment with torch, transformers and trl (`./run reference` makes one). 8 prompts,
4 answers each of exactly 32 tokens, float32, AdamW, one update a rollout, no KL. Printed: median wall and CPU seconds of a step after
the first two. TRL generates with transformers, without gradient checkpointing.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import argosy
from argosy.core.storage import Store
from argosy.jobs.train import Quiet
from argosy.observe.metrics import read

PROMPTS, EACH, TOKENS, STEPS, WARM = 8, 4, 32, 6, 2
TOPICS = ["the sea", "a small town", "bread", "winter", "an old clock", "the moon", "a long road", "music"]
REWARD = "def score(completions, **columns):\n    return [float(text.count('e')) for text in completions]\n"
TRL = """
import json, resource, sys, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
model, rows, how = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
times = []
def now():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), used.ru_utime + used.ru_stime
class Clock(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        times.append(now())
config = GRPOConfig(
    output_dir=how["dir"], per_device_train_batch_size=how["batch"], num_generations=how["each"], max_completion_length=how["tokens"],
    beta=0.0, learning_rate=1e-6, max_steps=how["steps"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
    logging_steps=1, save_strategy="no", disable_tqdm=True, generation_kwargs={"min_new_tokens": how["tokens"]},
)
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
score = lambda completions, **columns: [float(text.count("e")) for text in completions]
trainer = GRPOTrainer(net, score, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Clock()])
trainer.train()
print("TIMES", json.dumps(times))
"""


class Times(Quiet):
    """When each step was reported: wall and CPU seconds of this process and its children."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def step(self, step: int, numbers: Any) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.at.append((time.monotonic(), used.ru_utime + used.ru_stime))


def per_step(at: list[Any]) -> tuple[float, float]:
    """Median wall and CPU seconds of a step, after the first ones."""
    apart = np.diff(np.asarray(at), axis=0)[WARM - 1 :]
    wall, cpu = np.median(apart, 0)
    return float(wall), float(cpu)


def main() -> None:
    model, python = sys.argv[1], sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS
    folder = Path(tempfile.mkdtemp())
    rows = [{"prompt": f"Here is a story about {topic}:"} for topic in TOPICS]
    try:
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(REWARD)
        how = {"dir": str(folder / "trl"), "batch": PROMPTS * EACH, "each": EACH, "tokens": TOKENS, "steps": steps}
        done = subprocess.run([python, "-c", TRL, model, json.dumps(rows), json.dumps(how)], capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
        if not found:
            raise SystemExit(done.stderr[-2000:])
        theirs = per_step(json.loads(found[0].removeprefix("TIMES ")))
        view, run = Times(), folder / "run"
        words = [f"model={model}", f"data.source={folder / 'prompts.jsonl'}", f"reward={folder / 'reward.py'}:score", f"dir={run}"]
        words += [f"data.batch={PROMPTS * EACH}", f"rollout.completions={EACH}", f"rollout.tokens={TOKENS}", "data.sequence=128"]
        words += ["eval.batches=0", "data.held_out=0", f"steps={steps}", "checkpoint.every=10000", "rollout.ignore_eos=true"]
        argosy.fit("grpo", *words, view=view)
        ours = per_step(view.at)
        lines = [line for line in read(Store(run)) if "loss" in line][WARM:]
        rewarded = float(np.median([line["reward_s"] for line in lines]))
        print(f"{PROMPTS * EACH} answers of {TOKENS} tokens, {steps} steps\n")
        print("| | wall s a step | CPU s a step |\n|---|---|---|")
        print(f"| TRL | {theirs[0]:.2f} | {theirs[1]:.2f} |\n| argosy | {ours[0]:.2f} | {ours[1]:.2f} |")
        print(f"\n{theirs[0] / ours[0]:.2f} times as fast (CPU {theirs[1] / ours[1]:.2f}); rewards took {rewarded:.4f} s of a step")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
