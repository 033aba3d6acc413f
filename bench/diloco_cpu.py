"""How replicas that train alone learn (`diloco.every`), beside a run that sums gradients in every step.

    ./run python bench/diloco_cpu.py [steps=600] [replicas=4] [seeds=2] [every=10,30,100] [dir=FOLDER] [SETTING=VALUE ...]

`tiny` on the standard library's source, with the same batches for every row of the table; a replica has its share of their rows. Prints
the held-out loss of the outer weights after the last step, by seed, its mean, what was sent between replicas for each step (an
all-reduce of so many numbers as the model has, and how often), and how far apart the replicas were at the last outer step, against how
far they had gone. One replica alone is a run on its share of the rows, without the others. Names with a dot are settings of all runs.
"""

import os
import sys
import tempfile
from statistics import mean

GIVEN = {"steps": "600", "replicas": "4", "seeds": "2", "every": "10,30,100"}
GIVEN |= dict(word.partition("=")[::2] for word in sys.argv[1:])
# Before jax starts.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={GIVEN['replicas']}"

ROWS = 16


def main() -> None:
    from argosy.core.storage import Store
    from argosy.jobs.train import Quiet, train
    from argosy.observe.metrics import read

    steps, replicas, seeds = (int(GIVEN[name]) for name in ("steps", "replicas", "seeds"))
    settings = [f"{name}={value}" for name, value in GIVEN.items() if "." in name]
    common = [f"steps={steps}", f"eval.every={steps}", "eval.batches=20", "checkpoint.every=100000", "log.every=10", *settings]
    over = [f"data.batch={ROWS}", f"mesh.data={replicas}", "mesh.fsdp=1"]
    variants = {
        "summed in every step": (over, 1.0),
        # The rest of the devices splits nothing: a batch of so few rows has no share for each.
        "one replica alone": ([f"data.batch={ROWS // replicas}", "mesh.fsdp=1", f"mesh.tensor={replicas}"], 0.0),
    }
    for every in map(int, GIVEN["every"].split(",")):
        variants[f"every {every}, lr 0.7, momentum 0.9"] = ([*over, f"diloco.every={every}"], 1 / every)
        plain = ["diloco.lr=1", "diloco.momentum=0"]
        variants[f"every {every}, lr 1, momentum 0"] = ([*over, f"diloco.every={every}", *plain], 1 / every)
    print("| weights | held-out loss | by seed | all-reduces a step | replicas apart / gone |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, (words, sums) in variants.items():
            losses, last = list[float](), dict[str, float]()
            for seed in range(seeds):
                run = os.path.join(GIVEN.get("dir", scratch), f"{name.replace(' ', '-').replace(',', '')}-{seed}")
                train("tiny", [*common, *words, f"seed={seed}", f"dir={run}"], Quiet())
                lines = read(Store(run))
                losses.append(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line))
                last = next(line for line in reversed(lines) if "loss" in line)
            apart = f"{last['replicas_apart']:.3g} / {last['outer_grad_norm']:.3g}" if "replicas_apart" in last else ""
            print(f"| {name} | {mean(losses):.4f} | {', '.join(f'{loss:.4f}' for loss in losses)} | {sums:.3g} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
