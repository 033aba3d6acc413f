"""Decoding with quantized weights on a CPU: tokens a second of a step at 1, 8 and 32 rows, by preset, in turn.

    ./run python bench/quantized_cpu.py MODEL [PRESET ...] [rows=1,8,32] [turns=20]

MODEL has float weights; `float32` stands for these. A .gguf file in place of a preset is another model, whose blocks are kept. After
`int8:` data is rounded to int8 (engine.activations). Rows hold 150 tokens. Wall time is the median and the least of all turns; CPU time
is that of the process, since machines are shared.
"""

import sys
from typing import Any

import jax
import numpy as np
from engine_cpu import HELD, clocked

from argosy.adapt.rules import preset_rules
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.step import split_words
from argosy.infer.load import load_lm
from argosy.infer.settings import EngineSettings

PRESETS = ("float32", "w8", "w8a8", "w4", "w4a8", "nf4", "mxfp4", "fp8", "w2")


def loaded(model: str, name: str) -> Any:
    if name.endswith(".gguf"):
        return load_lm(name, blocks=True)
    return load_lm(model, rules=None if name == "float32" else preset_rules(name))


def main(model: str, *words: str) -> None:
    how = dict(word.split("=", 1) for word in words if "=" in word)
    rows, turns = [int(n) for n in how.get("rows", "1,8,32").split(",")], int(how.get("turns", 20))
    engines, weights = {}, {}
    for name in [word for word in words if "=" not in word] or PRESETS:
        activations, _, source = name.rpartition(":")
        settings = EngineSettings(slots=32, context=2048, pages=512, activations=activations or None)
        engines[name] = Engine(loaded(model, source).module, settings, exclusive=True)
        weights[name] = engines[name].runner.forward.prepared(engines[name].weights())
    size = {name: sum(a.nbytes for a in jax.tree.leaves(own)) / 1e6 for name, own in weights.items()}
    print("| weights | MB | rows | tokens/s | ms | least | CPU ms |\n|---|---|---|---|---|---|---|", flush=True)
    for count in rows:
        sizes = next(iter(engines.values())).runner.batches.decode_sizes(count)
        state = np.zeros(sizes.words, np.int32)
        d, *_ = split_words(state, sizes)
        d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), HELD, -1
        d["table"][:, :10] = np.arange(10 * count).reshape(count, 10)
        given = state, np.arange(count, dtype=np.int32), sizes

        def call(name: str, given: Any = given) -> Any:
            runner = engines[name].runner
            logits, runner.caches, _ = runner.forward.step(weights[name], runner.caches, runner.slots.last, *given)
            return logits

        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for turn in range(turns + 1):
            for name, times in spent.items():
                took = clocked(lambda name=name: call(name))
                times += [took] if turn else []
        for name, times in spent.items():
            (wall, cpu), least = 1e3 * np.median(times, 0), 1e3 * np.min(times, 0)[0]
            figures = f"{1e3 * count / wall:.1f} | {wall:.1f} | {least:.1f} | {cpu:.1f}"
            print(f"| {name} | {size[name]:.0f} | {count} | {figures} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
