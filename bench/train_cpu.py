"""The 31M Llama on a CPU: `argosy train` beside PyTorch in eager mode, alternating, and the machine's own matmul peak.

    ./run python bench/train_cpu.py --torch PYTHON [--rounds 3] [--steps 8] [--script FILE] [--products amx xla]

PYTHON is an interpreter with torch (`./run reference` makes one); FILE the PyTorch program, which prints one JSON line with
`all_s` (the prototype's bench_torch.py takes --model 30m --batch 8 --seq 256 --steps N --mode eager). Losses at the first
step differ: the two draw their own weights.

Convention: 6 N T plus causal attention halved, the embedding counted once (tied). Best and median step of each round, the
first two left out (compilation, first touch of memory).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

TOKENS = 8 * 256
LAYERS, WIDTH, SEQUENCE, PARAMETERS = 12, 384, 256, 31_171_968
FLOPS = 6 * PARAMETERS * TOKENS + 12 * LAYERS * SEQUENCE * WIDTH * TOKENS / 2


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--torch", help="an interpreter with torch")
    words.add_argument("--script", help="the PyTorch program")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--steps", type=int, default=8)
    words.add_argument("--products", nargs="*", default=[None], help="values of execution.products, in turn")
    options = words.parse_args()
    peak = matmul_peak()
    print(f"matmul peak, 2048^3 float32: {peak / 1e9:.0f} GFLOP/s")
    print(
        "| round | | best s | median s | tokens/s | CPU s a step | GFLOP/s | of peak |\n|---|---|---|---|---|---|---|---|"
    )
    ratios = []
    for i in range(options.rounds):
        middle = 0.0
        for products in options.products:
            best, middle, cpu = ours(options.steps, products)
            row(i, f"argosy train {products or ''}", best, middle, cpu, peak)
        if options.torch and options.script:
            other, other_middle, other_cpu = torch_eager(options.torch, options.script, options.steps)
            row(i, "torch eager", other, other_middle, other_cpu, peak)
            ratios.append(other_middle / middle)
    if ratios:
        print(f"\ntokens per second of torch eager, by median step: {', '.join(f'{r:.2f}' for r in ratios)} times")


def row(i: int, name: str, best: float, middle: float, cpu: float, peak: float) -> None:
    rate = FLOPS / best
    print(
        f"| {i + 1} | {name} | {best:.3f} | {middle:.3f} | {TOKENS / middle:.0f} | {cpu:.2f} | {rate / 1e9:.0f} "
        f"| {rate / peak:.0%} |",
        flush=True,
    )


def ours(steps: int, products: str | None) -> tuple[float, float, float]:
    """Best and median seconds of a step through the whole command, and CPU seconds a step of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "argosy", "train", "bench-31m", f"steps={steps}", f"dir={run}"]
        command += [f"execution.products={products}"] if products else []
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [TOKENS / line["tokens_per_s"] for line in lines if "loss" in line][2:]
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return min(seconds), median(seconds), cpu / steps


def torch_eager(python: str, script: str, steps: int) -> tuple[float, float, float]:
    command = [
        python,
        script,
        "--model",
        "30m",
        "--mode",
        "eager",
        "--batch",
        "8",
        "--seq",
        "256",
        "--steps",
        str(steps),
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return report["best_s"], report["med_s"], report["cpu_s"]


def matmul_peak() -> float:
    """FLOP/s of a float32 product, the best of eight."""
    import jax
    import jax.numpy as jnp

    n = 2048
    a = jnp.ones((n, n), jnp.float32)
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


if __name__ == "__main__":
    main()
