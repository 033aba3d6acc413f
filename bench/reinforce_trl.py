"""A step of GRPO beside TRL's: the same model, prompts, numbers and lengths of answers, on this machine.

    ./run python bench/reinforce_trl.py MODEL TRL_PYTHON [problems=FILE.jsonl] [prompts=8] [each=4] [tokens=32] [steps=6] [bf16=false]
        [SETTING=VALUE ...]

MODEL: a Hub folder. TRL_PYTHON: the Python of an environment with torch, transformers and trl (`./run reference` makes one); `none`
measures argosy alone. problems: its rows have a `question`, which is asked in the model's chat template; without it prompts are 8
tokens of plain text. Every prompt gets `each` answers of exactly `tokens` tokens: float32, AdamW, one update a rollout, no KL. bf16:
TRL computes in bfloat16, as its defaults do. Other words are settings of argosy's run, such as `rollout.share_prompts=false`. Printed:
median wall and CPU seconds of a step after the first two, and how long the prompts are. TRL generates with transformers, without
gradient checkpointing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.storage import Store
from argosy.observe.metrics import read

WARM = 2
SIZES = {"prompts": 8, "each": 4, "tokens": 32, "steps": 6}
# A row holds a prompt of so many tokens with all of its answers; longer prompts have their answers in two rows.
PROMPT = 128
TOPICS = ["the sea", "a small town", "bread", "winter", "an old clock", "the moon", "a long road", "music"]
REWARD = """
def score(completions, **columns):
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text.count("e")) for text in said]
"""
TRL = """
import json, resource, runpy, sys, time
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
    beta=0.0, learning_rate=1e-6, max_steps=how["steps"], use_cpu=True, bf16=how["bf16"], gradient_checkpointing=False,
    report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True, generation_kwargs={"min_new_tokens": how["tokens"]},
)
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
score = runpy.run_path(how["reward"])["score"]
trainer = GRPOTrainer(net, score, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Clock()])
trainer.train()
ids = lambda prompt: tokenizer(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(
    prompt, add_generation_prompt=True, return_dict=True)
print("FOUND", json.dumps({"times": times, "lengths": [len(ids(row["prompt"])["input_ids"]) for row in rows]}))
"""
# As `argosy train` does, before the process has a second thread.
ARGOSY = """
import json, resource, sys, time
from argosy.core.process.allocator import share_one_arena
share_one_arena()
import argosy
from argosy.jobs.train import Quiet
class Times(Quiet):
    at = []
    def step(self, step, numbers):
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.at.append((time.monotonic(), used.ru_utime + used.ru_stime))
argosy.fit("grpo", *sys.argv[1:], view=Times())
print("FOUND", json.dumps({"times": Times.at}))
"""


def found_by(command: list[str]) -> dict[str, Any]:
    """What a process prints last, as JSON. Its malloc takes huge pages, as that of `argosy train` does by itself."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(lines[0].removeprefix("FOUND "))


def per_step(at: list[Any]) -> tuple[float, float]:
    """Median wall and CPU seconds of a step, after the first ones."""
    apart = np.diff(np.asarray(at), axis=0)[WARM - 1 :]
    wall, cpu = np.median(apart, 0)
    return float(wall), float(cpu)


def asked(problems: str | None, count: int) -> list[dict[str, Any]]:
    """Prompts in the form that both read."""
    if problems is None:
        return [{"prompt": f"Here is a story about {topic}:"} for topic in TOPICS[:count]]
    lines = Path(problems).read_text(encoding="utf-8").splitlines()[:count]
    return [{"prompt": [{"role": "user", "content": json.loads(line)["question"]}]} for line in lines]


def main() -> None:
    model, python = sys.argv[1], sys.argv[2]
    words = dict(word.split("=", 1) for word in sys.argv[3:])
    prompts, each, tokens, steps = (int(words.pop(name, size)) for name, size in SIZES.items())
    bf16 = words.pop("bf16", "false") == "true"
    # Each step asks all of them.
    rows = asked(words.pop("problems", None), prompts)
    chat = not isinstance(rows[0]["prompt"], str)
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(REWARD)
        theirs = None
        if python != "none":
            options = {"dir": str(folder / "trl"), "reward": str(folder / "reward.py"), "batch": len(rows) * each, "each": each}
            options |= {"tokens": tokens, "steps": steps, "bf16": bf16}
            report = found_by([python, "-c", TRL, model, json.dumps(rows), json.dumps(options)])
            theirs = per_step(report["times"])
            print(f"prompts of {min(report['lengths'])} to {max(report['lengths'])} tokens")
        run = folder / "run"
        sequence = PROMPT + each * (tokens + 1) if chat else 128
        run_settings: dict[str, Any] = {"model": model, "data.source": folder / "prompts.jsonl"}
        run_settings["reward"] = f"{folder / 'reward.py'}:score"
        run_settings |= {"dir": run, "data.batch": len(rows) * each, "data.sequence": sequence, "data.held_out": 0, "eval.batches": 0}
        run_settings |= {"rollout.completions": each, "rollout.tokens": tokens, "rollout.ignore_eos": "true"}
        run_settings |= {"steps": steps, "checkpoint.every": 10000}
        settings = [f"{name}={value}" for name, value in (run_settings | words).items()]
        ours = per_step(found_by([sys.executable, "-c", ARGOSY, *settings])["times"])
        lines = [line for line in read(Store(run)) if "loss" in line][WARM:]
        spent = {name: float(np.median([line[name] for line in lines])) for name in ("generate_s", "logps_s", "reward_s")}
        print(f"{each} answers of {tokens} tokens to each of {len(rows)} prompts, {steps} steps\n")
        print("| | wall s a step | CPU s a step |\n|---|---|---|")
        if theirs is not None:
            print(f"| TRL | {theirs[0]:.2f} | {theirs[1]:.2f} |")
        print(f"| argosy | {ours[0]:.2f} | {ours[1]:.2f} |\n")
        print(f"of argosy's step, s: {', '.join(f'{name} {value:.4f}' for name, value in spent.items())}")
        if theirs is not None:
            print(f"{theirs[0] / ours[0]:.2f} times as fast (CPU {theirs[1] / ours[1]:.2f})")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
