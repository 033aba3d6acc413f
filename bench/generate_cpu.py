"""What generating costs on a CPU beside the model itself, in CPU seconds: the sampler, decode steps, programs compiled again.

    ./run python bench/generate_cpu.py sampler | start [PRESET] | decode [PRESET ...]

sampler: ms a step for 4 rows, by vocabulary and settings. start: the first call of a process without a compilation cache, then
calls of other sizes. decode: ms a token of 128, unrolled and scanned, the best of three calls that compile nothing.

CPU time of the process, since the machines that this was written on are shared. Logits are normal with deviation 3.
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from argosy.infer.load import random_lm
from argosy.infer.sampling.sample import Sampling, next_tokens, sampling_columns
from argosy.models.parts.stack import Scan, Unroll
from argosy.run.settings.recipe_files import preset_config

SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0),
    "top-k 50": Sampling(temperature=1.0, top_k=50),
    "top-p 0.9, peaked": Sampling(temperature=0.3, top_p=0.9),
    "top-p 0.9, flat": Sampling(temperature=1.0, top_p=0.9),
    "min-p 0.1": Sampling(temperature=1.0, min_p=0.1),
}
PROMPT = [3, 5, 7, 9, 11]


def sampler() -> None:
    print("| vocabulary | " + " | ".join(SETTINGS) + " |\n|---|" + "---|" * len(SETTINGS))
    for V in (32_768, 131_072, 262_144):
        logits = jnp.asarray(3 * np.random.default_rng(0).standard_normal((4, V)), jnp.float32)
        keys, row = jax.random.split(jax.random.key(0), 4), []
        for sampling in SETTINGS.values():
            settings, step = sampling_columns([sampling] * 4), jax.jit(lambda x, s, k: next_tokens(x, x, s, k))
            call = partial(step, logits, settings, keys)
            row.append(1e3 * best(lambda call=call: jax.block_until_ready(call()), 6))
        print(f"| {V:,} | " + " | ".join(f"{ms:.1f}" for ms in row) + " |", flush=True)


def start(preset: str = "smollm2-135m") -> None:
    start_time = time.process_time()
    lm = random_lm(preset_config(preset), 0)
    print(f"random weights {time.process_time() - start_time:.1f}", flush=True)
    calls = {
        "first, 16 tokens": ([PROMPT], 16, {}),
        "again": ([PROMPT], 16, {}),
        "128 tokens": ([PROMPT], 128, {}),
        "128 tokens again": ([PROMPT], 128, {}),
        "3 rows": ([PROMPT] * 3, 16, {}),
        "3 rows again": ([PROMPT] * 3, 16, {}),
        "first temperature": ([PROMPT], 16, {"temperature": 1.0}),
        "first top_p": ([PROMPT], 16, {"temperature": 1.0, "top_p": 0.9}),
        "prompt of 100": ([PROMPT * 20], 16, {}),
        "prompt of 100 again": ([PROMPT * 20], 16, {}),
    }
    for name, (prompts, most, options) in calls.items():
        print(f"{name} {best(lambda p=prompts, m=most, h=options: lm.generate(p, m, ignore_eos=True, **h), 1, 0):.1f}", flush=True)


def decode(*presets: str) -> None:
    for preset in presets or ("argosy-1m", "smollm2-135m"):
        for run in (Unroll(), Scan()):
            lm = random_lm(preset_config(preset), 0, run=run)
            for rows in (1, 4):
                seconds = best(lambda lm=lm, n=rows: lm.generate([PROMPT] * n, 129, ignore_eos=True), 3)
                print(f"{preset} {type(run).__name__} {rows} rows: {1e3 * seconds / 128:.2f} ms a step", flush=True)


def best(call, times: int, warm: int = 1) -> float:
    for _ in range(warm):
        call()
    spent = []
    for _ in range(times):
        start_time = time.process_time()
        call()
        spent.append(time.process_time() - start_time)
    return min(spent)


if __name__ == "__main__":
    {"sampler": sampler, "start": start, "decode": decode}[sys.argv[1]](*sys.argv[2:])
