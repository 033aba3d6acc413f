"""A feed-forward layer of experts on a CPU: ours beside transformers' Qwen3-MoE block in each of its implementations.

    ./run python bench/moe_cpu.py --torch PYTHON [--rounds 3] [--ffn 256 512]

PYTHON is an interpreter with torch and transformers (`./run reference` makes one). 64 experts, 8 chosen by each of 2,048
tokens, width 512, float32, random weights, a thread for each core the process may use (`taskset -c 0` for one). Router,
choice, sort, three products and the weighted sum: forward alone, then forward and backward to all weights and the input.
Every measurement is a process of its own, and the programs take turns. All get huge pages (`GLIBC_TUNABLES`), as
`argosy train` does. The floor is the FLOPs of the experts and the router at the speed of a 2048^3 product.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

TOKENS, EXPERTS, TOP, WIDTH = 2048, 64, 8, 512
REPEATS = {"forward": 15, "both": 5}
TORCH = ("eager", "grouped_mm", "batched_mm")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--torch", help="an interpreter with torch and transformers")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--ffn", type=int, nargs="+", default=[256, 512], help="width of an expert")
    words.add_argument("--only", help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.only:
        print(json.dumps(ours(options.ffn[0]) if options.only == "argosy" else theirs(options.only, options.ffn[0])))
        return
    print(f"{EXPERTS} experts, top {TOP}, width {WIDTH}, {TOKENS} tokens, float32, {threads()} threads")
    print(f"medians (best) of {options.rounds} rounds\n")
    print("| expert width | | forward ms | argosy is | CPU ms | forward and backward ms | argosy is | CPU ms |")
    print("|---|---|---|---|---|---|---|---|")
    for ffn in options.ffn:
        table(ffn, options.torch, options.rounds)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def table(ffn: int, torch: str | None, rounds: int) -> None:
    runs_of: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name in ("argosy", *(TORCH if torch else ())):
            runs_of.setdefault(name, []).append(apart(torch if name in TORCH and torch else sys.executable, name, ffn))
    flops = 2 * TOKENS * WIDTH * (EXPERTS + 3 * TOP * ffn)
    peak = max(run["peak"] for run in runs_of["argosy"])
    mine = {mode: median(run[mode]["wall"] for run in runs_of["argosy"]) for mode in REPEATS}
    for name, runs in runs_of.items():
        if "refused" in runs[0]:
            print(f"| {ffn} | transformers {name} | {runs[0]['refused']} | | | | | |")
            continue
        cells = []
        for mode in REPEATS:
            wall, cpu = (median(run[mode][key] for run in runs) for key in ("wall", "cpu"))
            best = min(run[mode]["best"] for run in runs)
            cells += [
                f"{wall * 1e3:.0f} ({best * 1e3:.0f})",
                "" if name == "argosy" else f"{wall / mine[mode]:.2f} x",
                f"{cpu * 1e3:.0f}",
            ]
        print(f"| {ffn} | {'' if name == 'argosy' else 'transformers '}{name} | {' | '.join(cells)} |", flush=True)
    floors = (
        f"{flops * times / peak * 1e3:.0f} | {flops * times / peak / mine[mode]:.2f} x |"
        for mode, times in zip(REPEATS, (1, 3))
    )
    print(f"| {ffn} | floor, at {peak / 1e9:.0f} GFLOP/s | {' | '.join(floors)} |", flush=True)


def apart(python: str, name: str, ffn: int) -> dict[str, Any]:
    """One program in a process of its own."""
    environment = os.environ | {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "2",
    }
    command = [python, __file__, "--only", name, "--ffn", str(ffn)]
    completed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(completed.stdout.splitlines()[-1])


def timed(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and best seconds of the wall and median of the processor, the first two runs left out."""
    wall, cpu = [], []
    for _ in range(repeats + 2):
        start, used = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return {"wall": median(wall[2:]), "best": min(wall[2:]), "cpu": median(cpu[2:])}


def ours(ffn: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from argosy.models.parts.moe import MoE
    from argosy.models.parts.weight import fill, merge, split
    from argosy.models.settings import Experts

    layer = MoE({"D": WIDTH}, Experts(count=EXPERTS, active=TOP, ffn=ffn))
    fill(layer, jax.random.key(0), addresses=lambda address: [address])
    graph, weights = split(layer)
    x, live = jax.random.normal(jax.random.key(1), (1, TOKENS, WIDTH)), jnp.ones((1, TOKENS), bool)

    def block(weights: Any, x: Any) -> Any:
        return merge(graph, weights)(x, live)[0]

    forward = jax.jit(block)
    both = jax.jit(jax.grad(lambda weights, x: jnp.sum(jnp.sin(block(weights, x))), (0, 1)))
    times: dict[str, Any] = {
        mode: timed(lambda run=run: jax.block_until_ready(run(weights, x)), REPEATS[mode])
        for mode, run in (("forward", forward), ("both", both))
    }
    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.dot)
    best = min(timed(lambda: product(square, square).block_until_ready(), 1)["wall"] for _ in range(8))
    return times | {"peak": 2 * 2048**3 / best}


def theirs(name: str, ffn: int) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock  # pyright: ignore[reportMissingImports]

    if name == "batched_mm":  # a copy of its expert's weights for each row
        return {"refused": f"copies {TOKENS * TOP * 3 * WIDTH * ffn * 4 / 2**30:.0f} GiB of weights: not run"}
    torch.manual_seed(0)
    torch.set_num_threads(threads())
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": ffn, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    config._experts_implementation = name
    layer = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=WIDTH**-0.5)
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).sin().sum().backward()

    return {mode: timed(run, REPEATS[mode]) for mode, run in (("forward", forward), ("both", both))}


if __name__ == "__main__":
    main()
