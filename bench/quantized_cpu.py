"""Decoding with quantized weights on a CPU: tokens a second of a step at 1, 8 and 32 rows, by preset, in turn.

    ./run python bench/quantized_cpu.py MODEL [PRESET ...] [rows=1,8,32] [turns=20] [text=FILE]

MODEL has float weights; `float32` stands for these. A .gguf file in place of a preset is another model, whose blocks are kept. After
`int8:` data is rounded to int8 (engine.activations). Rows hold 150 tokens. Wall time is the median and the least of all turns; CPU
time is that of the process, since machines are shared. With a text, the perplexity of its first 2,048 tokens, as the kernels compute
them, and the divergence of the next token's distribution from that of the first weights.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine_cpu import HELD, clocked

from argosy.adapt.rules import preset_rules
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.passes import PassKind, whole_sequences
from argosy.infer.forward.step import split_words
from argosy.infer.load import load_lm
from argosy.infer.settings import EngineSettings
from argosy.models.parts.attention.attend import Paged
from argosy.models.parts.attention.cache import empty_pools

PRESETS = ("float32", "w8", "w8a8", "w4", "w4a8", "nf4", "mxfp4", "fp8", "w2")


def loaded(model: str, name: str) -> Any:
    if name.endswith(".gguf"):
        return load_lm(name, blocks=True)
    return load_lm(model, rules=None if name == "float32" else preset_rules(name))


def every_logit(model: Any, x: Any) -> Any:
    return model.unembed(x)


def quality(engines: dict[str, Any], weights: dict[str, Any], ids: np.ndarray, width: int = 256) -> None:
    """Perplexity, in calls of 256 tokens, and the divergence from the first weights."""
    most, base = len(ids) - 1, None
    table, t = jnp.arange(most // 16, dtype=jnp.int32)[None], jnp.arange(width, dtype=jnp.int32)[None]
    for name, engine in engines.items():
        forward, chances = engine.runner.forward, []
        caches = empty_pools(forward.specs, 1, most // 16, 16, longest=most, slack=most)
        for at in range(0, most, width):
            where = (jnp.zeros(1, jnp.int32), jnp.full(1, at, jnp.int32), jnp.full(1, width, jnp.int32))
            inputs = ids[None, at : at + width].astype(np.int32), Paged(table, *where, t)
            logits, caches = forward(PassKind(whole_sequences, every_logit), weights[name], inputs, caches)
            chances.append(np.asarray(jax.nn.log_softmax(logits[0])))
        whole = np.concatenate(chances)
        base = whole if base is None else base
        loss = -whole[np.arange(most), ids[1 : most + 1]].mean()
        divergence = (np.exp(base) * (base - whole)).sum(-1)
        same = 100 * (base.argmax(-1) == whole.argmax(-1)).mean()
        print(f"| {name} | {np.exp(loss):.3f} | {divergence.mean():.5f} | {same:.1f} |", flush=True)


def main(model: str, *words: str) -> None:
    options = dict(word.split("=", 1) for word in words if "=" in word)
    rows, turns = [int(n) for n in options.get("rows", "1,8,32").split(",")], int(options.get("turns", 20))
    engines, weights = {}, {}
    for name in [word for word in words if "=" not in word] or PRESETS:
        activations, _, source = name.rpartition(":")
        settings = EngineSettings(slots=32, context=2048, pages=512, activations=activations or None)
        engines[name] = Engine(loaded(model, source).module, settings, exclusive=True)
        weights[name] = engines[name].runner.forward.prepared(engines[name].weights())
    if "text" in options:
        ids = load_lm(model).encode(Path(options["text"]).read_text(encoding="utf-8")[:16384])[:2049]
        print("| weights | perplexity | KL, nats | same likeliest, % |\n|---|---|---|---|", flush=True)
        quality(engines, weights, np.asarray(ids))
    size = {name: sum(a.nbytes for a in jax.tree.leaves(arrays)) / 1e6 for name, arrays in weights.items()}
    print("| weights | MB | rows | tokens/s | ms | least | CPU ms |\n|---|---|---|---|---|---|---|", flush=True)
    for count in rows:
        sizes = next(iter(engines.values())).runner.batches.decode_sizes(count)
        state = np.zeros(sizes.words, np.int32)
        d, *_ = split_words(state, sizes)
        d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), HELD, -1
        d["table"][:, :10] = np.arange(10 * count).reshape(count, 10)
        inputs = state, np.arange(count, dtype=np.int32), sizes

        def call(name: str, inputs: Any = inputs) -> Any:
            runner = engines[name].runner
            logits, runner.caches, _ = runner.forward.step(weights[name], runner.caches, runner.slots.last, *inputs)
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
