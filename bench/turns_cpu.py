"""Credit by turn: how fast a policy learns with the rewards of turns added up, as reward to go, and mixed with the outcome.

    ./run python bench/turns_cpu.py [STEPS] [SEEDS] [GAME ...] [svg=docs/images/turns.svg]

In each of eight turns the environment says `<` or `>`, and the policy answers with one byte: an ASCII character is right after `<`, any
other byte after `>`. A right turn earns 1/8. Whoever does not listen is right in half of the turns. In the game `each` every turn is
played; in `until` the first wrong one ends the answer. A small Llama starts from random weights. Printed for each game and each
`objective.credit.by`: the mean reward over the updates of each quarter of the run, and by how much that of all updates is above that of
`answer` with the same seed, mean and 95 % interval (Student's t) over the seeds. With `svg=` the reward of the first game is drawn,
averaged over three updates.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from curves import averaged, draw, picture_of
from seeds import spread

import argosy
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read

STEPS, SEEDS, TURNS = 24, 5, 8
GAMES = {"each": False, "until": True}
WAYS = ("answer", "to_go", "mixed")
CODE = """
import random
from argosy.rl.environment import Turn

class Sides:
    def __init__(self, turns: int, until: bool): self.turns, self.left, self.until = turns, turns, until
    def reset(self, seed):
        self.random = random.Random(seed)
        return self.asked()
    def asked(self):
        self.side = self.random.choice("<>")
        return self.side
    def step(self, said):
        self.left -= 1
        right = (said == "\\ufffd") == (self.side == ">")
        return Turn(self.asked(), right / self.turns, self.left == 0 or (self.until and not right))
"""
MODEL = ["model.family=llama", "model.width=32", "model.layers=1", "model.ffn=64", "model.heads=2", "model.kv_heads=1"]
MODEL += ["model.vocab=258", "model.context=64", "data.tokenizer=byte"]
RUN = ["data.sequence=48", "data.batch=64", "data.held_out=0", "eval.batches=0", "rollout.completions=16", "rollout.rows=16"]
RUN += ["rollout.tokens=24", "rollout.ignore_eos=true", "environment.tokens=1", "environment.wait=2", "schedule=constant"]
RUN += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "log.every=1", "checkpoint.every=1000"]


def main() -> None:
    picture, words = picture_of(sys.argv[1:])
    steps, seeds = (int(words[i]) if len(words) > i else default for i, default in enumerate((STEPS, SEEDS)))
    games = words[2:] or list(GAMES)
    curves: dict[str, list[dict[int, float]]] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "game.py").write_text(CODE)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}:"}) + "\n" for i in range(10)))
        source = [f"data.source={folder / 'prompts.jsonl'}", f"environment={folder / 'game.py'}:Sides"]
        print("| game | credit | reward, 1st quarter | 2nd | 3rd | last | above `answer` |")
        print("|---|---|---|---|---|---|---|")
        for game in games:
            plain: list[float] = []
            for way in WAYS:
                quarters = []
                for seed in range(seeds):
                    run_words = [f"environment.args.turns={TURNS}", f"environment.args.until={str(GAMES[game]).lower()}"]
                    run_words += [f"seed={seed}", f"objective.credit.by={way}", f"steps={steps}", f"dir={folder / 'run'}"]
                    argosy.fit("grpo", *source, *MODEL, *RUN, *run_words)
                    rewards = by_step(read(Store(folder / "run")), "reward")
                    quarters.append([float(np.mean(part)) for part in np.array_split(list(rewards.values()), 4)])
                    if game == games[0]:
                        curves.setdefault(way, []).append(averaged(rewards, 3))
                    shutil.rmtree(folder / "run")
                cells = [spread(list(values)) for values in zip(*quarters, strict=True)]
                whole = [float(np.mean(quarter)) for quarter in quarters]
                plain = plain or whole
                cells += ["" if way == WAYS[0] else spread([a - b for a, b in zip(whole, plain, strict=True)])]
                print(f"| {game} | {way} | {' | '.join(cells)} |", flush=True)
        if picture is not None:
            draw(picture, curves, "reward by update", "mean reward of an answer")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
