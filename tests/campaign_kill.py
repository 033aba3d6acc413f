"""A run that is killed with SIGKILL again and again must end as if nothing had happened.

    ./run python tests/campaign_kill.py [n=20] [seed=0] [kind=text|grpo|ppo|ahead]

kind: what is trained. `grpo` and `ppo` learn from rewards with several updates a rollout, `ahead` samples its rollouts on a device
of its own while the other trains. One run is left alone; others of the same settings are killed n times, at random moments: a
fifth while they start, a fifth while a checkpoint is being written, the rest wherever they are within a second of their first
step. Each life must go on from the newest step that was committed when it began, write no loss that the uninterrupted run did
not write, and end with its weights. Prints a line for each kill; exit code 1 where one changed anything. It knows a run only
from outside: its process and its directory.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read

SMALL = ["model.width=16", "model.layers=1", "model.ffn=32", "model.heads=2", "model.kv_heads=1", "model.vocab=64"]
SMALL += ["model.context=32", "data.source=synthetic", "data.sequence=16", "data.batch=8", "schedule=constant"]
SMALL += ["log.every=1", "eval.batches=0"]
# Wide enough that a step takes some 10 ms: as much time goes by between saves as in them, of 0.2 s each.
WIDER = ["model.width=64", "model.layers=2", "model.ffn=128", "data.batch=64"]
STEPS, EVERY = 400, 20
WORDS = [*SMALL, *WIDER, f"steps={STEPS}", f"checkpoint.every={EVERY}"]
# Prompts and a reward for runs that learn from rewards, of steps of some 50 ms.
ASKING = [word for word in SMALL if not word.startswith(("data.", "eval.", "model.vocab", "model.context"))]
ASKING += ["model.family=llama", "model.vocab=258", "model.context=64", "data.sequence=24", "data.batch=16", "data.held_out=0.2"]
ASKING += ["eval.every=30", "rollout.tokens=6", "rollout.rows=4", "rollout.workers=1", "objective.kl=0.1"]
ASKING += ["checkpoint.every=10", "steps=120", "optimizer.learning_rate=1e-2"]
KINDS = {
    "text": ("tiny", WORDS),
    "grpo": ("grpo", [*ASKING, "rollout.completions=4", "rollout.epochs=2", "rollout.minibatches=2", "rollout.resample=1"]),
    "ppo": ("ppo", [*ASKING, "rollout.epochs=3"]),
    "ahead": ("grpo", [*ASKING, "rollout.completions=4", "rollout.epochs=2", "rollout.devices=1", "rollout.ahead=2"]),
}
REWARD = """
def digits(completions):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
"""
WISHES = ["start", "anywhere", "save", "anywhere", "anywhere"]
LIFE_S = 1.0  # at most so long after its first step
PATIENCE_S = 300
POLL_S = 0.002


@dataclass(frozen=True)
class Kill:
    """began: the newest committed step when the life began. first: the first step it wrote. last: the last one."""

    where: str
    began: int
    first: int | None
    last: int | None
    committed: int
    seconds: float

    @property
    def goes_on(self) -> bool:
        return self.first in (None, self.began + 1) and self.committed >= self.began


def launch(folder: Path, words: list[str], recipe: str = "tiny") -> subprocess.Popen[bytes]:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache"), "ARGOSY_HUGE_PAGES": "0"}
    if "rollout.devices=1" in words:
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "argosy", "train", recipe, *words, f"dir={folder}"]
    with (folder.parent / "words.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)


def newest(run: Path) -> int:
    return max(Checkpoints(run / "checkpoints").steps(), default=0)


def lines_from(run: Path, start: int = 0) -> list[tuple[int, float]]:
    """(step, loss) of every whole line from a byte of metrics.jsonl on."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    whole = [line for line in file.read_bytes()[start:].splitlines(keepends=True) if line.endswith(b"}\n")]
    lines = map(json.loads, whole)
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written that is not committed yet."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return False
    return any(d.name.isdigit() and not (d / "manifest.json").exists() for d in folder.iterdir())


def kind_of(name: str, folder: Path) -> tuple[str, list[str]]:
    """The recipe and the words of a kind; what they read is written into the folder."""
    recipe, words = KINDS[name]
    if name != "text":
        rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)} for i in range(10)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "rewards.py").write_text(REWARD)
        words = [*words, f"data.source={folder / 'prompts.jsonl'}", f"reward={folder / 'rewards.py'}:digits"]
    return recipe, words


def kill_once(run: Path, recipe_and_words: tuple[str, list[str]], wish: str, draw: random.Random, start_s: float) -> Kill | None:
    """One life and its end; None where the run was over before that."""
    first_step = newest(run)
    bytes_before = (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    start_for_s, life_s = draw.uniform(0, start_s), draw.uniform(0, LIFE_S)
    at = time.monotonic()
    process = launch(run, recipe_and_words[1], recipe_and_words[0])
    try:
        if wish == "start":
            wait_for(process, lambda: time.monotonic() - at > start_for_s, False)
        else:
            wait_for(process, lambda: bool(lines_from(run, bytes_before)), True)
            until = time.monotonic() + life_s
            wait_for(process, lambda: time.monotonic() > until, False)
            if wish == "save":
                wait_for(process, lambda: is_saving(run), False)
        over = process.poll() is not None
        saving = is_saving(run)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    if over:
        if process.returncode:
            raise RuntimeError(f"the run ended by itself with exit code {process.returncode}")
        return None
    steps = [step for step, _ in lines_from(run, bytes_before)]
    where = ("save" if saving else "step") if steps else "start"
    first, last = (steps[0], steps[-1]) if steps else (None, None)
    return Kill(where, first_step, first, last, newest(run), time.monotonic() - at)


def wait_for(process: subprocess.Popen[bytes], done: Callable[[], bool], must: bool) -> None:
    """Until `done()` or the end of the process, which is a failure where it must live."""
    limit = time.monotonic() + PATIENCE_S
    while not done():
        if process.poll() is not None:
            if must and process.returncode != 0:
                raise RuntimeError(f"the run ended by itself with exit code {process.returncode}")
            return
        if time.monotonic() > limit:
            raise RuntimeError(f"nothing happened in {PATIENCE_S} s")
        time.sleep(POLL_S)


def finish(run: Path, recipe_and_words: tuple[str, list[str]] = KINDS["text"]) -> float:
    """Lets a run end; seconds until its first new step."""
    bytes_before = (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    at = time.monotonic()
    process = launch(run, recipe_and_words[1], recipe_and_words[0])
    wait_for(process, lambda: bool(lines_from(run, bytes_before)), True)
    start_s = time.monotonic() - at
    if process.wait(timeout=PATIENCE_S):
        raise RuntimeError(f"the run failed with exit code {process.returncode}")
    return start_s


def differences(run: Path, alone: Path, steps: int) -> list[str]:
    """What of a run is not that of the uninterrupted one; every line counts, those written twice too."""
    expected = by_step(read(Store(alone)), "loss")
    lines = lines_from(run)
    out = [f"step {step}: loss {loss!r}, not {expected[step]!r}" for step, loss in lines if loss != expected[step]]
    if {step for step, _ in lines} != set(range(1, steps + 1)):
        out.append("steps are missing")
    if digest(run, steps) != digest(alone, steps):
        out.append("the weights differ")
    return out


def campaign(folder: Path, n: int, seed: int = 0, kind: str = "text") -> tuple[list[Kill], list[str]]:
    """n kills under `folder`; the kills, and everything that was not as it should be."""
    draw, recipe_and_words = random.Random(seed), kind_of(kind, folder)
    steps = next(int(word.partition("=")[2]) for word in reversed(recipe_and_words[1]) if word.startswith("steps="))
    alone, runs = folder / "alone", [folder / "killed 1"]
    start_s = finish(alone, recipe_and_words)
    kills: list[Kill] = []
    wrong: list[str] = []
    while len(kills) < n:
        kill = kill_once(runs[-1], recipe_and_words, WISHES[len(kills) % len(WISHES)], draw, start_s)
        if kill is None:
            wrong += differences(runs[-1], alone, steps)
            runs.append(folder / f"killed {len(runs) + 1}")
            continue
        kills.append(kill)
        print(row(len(kills), kill), flush=True)
        if not kill.goes_on:
            wrong.append(f"kill {len(kills)}: began at {kill.first}, though step {kill.began} was committed")
    if newest(runs[-1]) < steps:
        finish(runs[-1], recipe_and_words)
    return kills, wrong + differences(runs[-1], alone, steps)


def row(number: int, kill: Kill) -> str:
    first, last = kill.first or "-", kill.last or "-"
    return f"{number:4}  {kill.where:6} {kill.began:7} {first:>7} {last:>7} {kill.committed:10} {kill.seconds:8.1f}"


def main(words: list[str]) -> int:
    options = dict(word.split("=") for word in words)
    begin = time.monotonic()
    print(f"{'kill':4}  {'during':6} {'newest':>7} {'first':>7} {'last':>7} {'committed':>10} {'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        kills, wrong = campaign(Path(folder), int(options.get("n", 20)), int(options.get("seed", 0)), options.get("kind", "text"))
    places = ", ".join(f"{count} in {where}" for where, count in Counter(k.where for k in kills).most_common())
    seconds = time.monotonic() - begin
    print(f"{len(kills)} kills ({places}) in {seconds:.0f} s: {len(wrong)} differences from the uninterrupted run")
    for line in wrong[:10]:
        print(f"  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
