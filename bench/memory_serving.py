"""Resident memory of an engine, by stage: anonymous memory, mapped files, and the peak so far. On Linux.

    ./run python bench/memory_serving.py MODEL [engine setting=value ...]     such as pages=512 context=2048

The second run finds its programs on disk. After each stage stands what is left when malloc has returned what it can. Two rounds of 32
sequences, 128 tokens in and 64 out. Floor: float32 weights, 4 bytes each, and the interpreter with jax.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from argosy.core.process.resident import trim
from argosy.core.settings import read_settings, words_layer
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.load import load_lm
from argosy.infer.settings import EngineSettings
from argosy.jobs.machine import programs_folder, start_jax
from argosy.observe.memory import peak_bytes
from argosy.ops.programs.store import open_store

ROUNDS, SEQUENCES, PROMPT, ANSWER = 2, 32, 128, 64


def row(stage: str) -> None:
    sizes = {}
    for name in (stage, f"{stage}, trimmed"):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        sizes = {key: int(value.split()[0]) / 1000 for key, value in (line.split(":") for line in lines)}
        rss, anonymous = sizes["Rss"], sizes["Anonymous"]
        print(f"| {name} | {rss:,.0f} | {anonymous:,.0f} | {rss - anonymous:,.0f} | {peak_bytes() / 1e6:,.0f} |", flush=True)
        trim()


def main(model: str, *words: str) -> None:
    settings = read_settings(EngineSettings, words_layer(list(words))).value
    start_jax()
    jax.devices()
    print("| stage | resident, MB | anonymous | files | peak |\n| --- | --- | --- | --- | --- |")
    row("jax")
    lm = load_lm(model)
    row("loaded")
    engine = Engine(lm.module, settings, exclusive=True)
    row(f"cache: {engine.runner.describe_cache()}")
    engine.warm_up(open_store(programs_folder()))
    row("warmed up")
    draw = np.random.default_rng(0)
    for i in range(ROUNDS):
        prompts = draw.integers(0, engine.vocab, (SEQUENCES, PROMPT)).tolist()
        engine.generate([Request(prompt, ANSWER) for prompt in prompts])
        row(f"round {i + 1}")


if __name__ == "__main__":
    main(*sys.argv[1:])
