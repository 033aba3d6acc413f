"""The compiled kernels for CPUs beside what XLA has, in turn.

./run python bench/native_cpu.py products [ROWS ...]    all products of SmolLM2 135M, ms, and the floor of reading its weights
./run python bench/native_cpu.py attention              attention over pages, ms, by implementation
./run python bench/native_cpu.py training [ROWS ...]    products of a training step and of its gradients, GFLOP/s
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.ops import matmul
from argosy.ops.attention import Score
from argosy.ops.native import library
from argosy.ops.native.products import pack_panels, product
from argosy.ops.op import implementations
from argosy.ops.paged.attention import PAGED_ATTENTION

LAYERS, WIDTH, FFN, VOCAB, TURNS = 30, 576, 1536, 49152, 15
MATRICES = ((WIDTH, 960), (WIDTH, WIDTH), (WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH))
# Rows, queries a row, query heads, key heads, size, longest sequence.
SHAPES = (
    (1, 1, 9, 3, 64, 150),
    (8, 1, 9, 3, 64, 150),
    (32, 1, 9, 3, 64, 150),
    (32, 1, 9, 3, 64, 900),
    (32, 1, 32, 8, 128, 900),
)
SHAPES += ((1, 128, 9, 3, 64, 128), (1, 512, 9, 3, 64, 2048), (4, 128, 32, 8, 128, 1024))


def medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each call; the calls take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                spent[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(times)) for name, times in spent.items()}


def shown(title: str, times: Mapping[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in times.items()), flush=True)


def products(*rows: str) -> None:
    rng = np.random.default_rng(0)
    shapes = [*MATRICES * LAYERS, (WIDTH, VOCAB)]
    plain = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    halves = [w.astype(jnp.bfloat16).astype(jnp.float32) for w in plain]
    forms = {
        "XLA": (plain, lambda x, w: x @ w),
        "float32": ([pack_panels(w, 1, True) for w in plain], product),
        "bfloat16": ([pack_panels(w, 1, True) for w in halves], product),
    }
    size = sum(w.nbytes for w in plain)
    start = time.perf_counter()
    sum(float(np.asarray(w).sum()) for w in plain)
    print(
        f"{size / 1e6:.0f} MB of weights, summed by NumPy on one core in {1e3 * (time.perf_counter() - start):.0f} ms"
    )
    for count in [int(word) for word in rows] or [1, 2, 4, 8, 16, 32, 64, 128, 512]:
        inputs = {k: jnp.asarray(rng.normal(size=(count, k)).astype(np.float32)) for k in (WIDTH, FFN)}

        def all_of(
            weights: Sequence[Any], multiply: Callable[[Any, Any], Any], inputs: Any = inputs
        ) -> Callable[[], Any]:
            def every(weights: Sequence[Any], inputs: Any) -> Any:
                return [multiply(inputs[k], w).sum(1) for (k, _), w in zip(shapes, weights, strict=True)]

            compiled = jax.jit(every)
            return lambda: compiled(weights, inputs)

        shown(f"{count} rows", medians({name: all_of(*form) for name, form in forms.items()}))


def training(*rows: str) -> None:
    rng = np.random.default_rng(0)
    head = (WIDTH, VOCAB // 8)  # a block of the vocabulary
    counts = {
        (WIDTH, WIDTH): 2 * LAYERS,
        (WIDTH, 192): 2 * LAYERS,
        (WIDTH, FFN): 2 * LAYERS,
        (FFN, WIDTH): LAYERS,
        head: 8,
    }
    for M in map(int, rows or ("512", "1344")):
        total: dict[str, float] = {}
        for (K, N), count in counts.items():
            x, w, g = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((M, K), (K, N), (M, N)))
            calls: dict[str, Callable[[], Any]] = {}
            for name in matmul.MATMUL:
                for operand, (a, b, *order) in {"y": (x, w, 1, 0), "dx": (g, w, 1, 1), "dw": (x, g, 0, 0)}.items():
                    with implementations(products=name):
                        program = (
                            jax.jit(partial(matmul.matmul, a_summed=order[0], b_summed=order[1])).lower(a, b).compile()
                        )
                    calls[f"{name} {operand}"] = partial(program, a, b)
            times = medians(calls)
            for name in matmul.MATMUL:
                total[name] = total.get(name, 0) + count * sum(times[f"{name} {operand}"] for operand in ("y", "dx", "dw"))
            shown(f"{M} x {K} x {N}, GFLOP/s", {name: 2e-6 * M * K * N / ms for name, ms in times.items()})
        shown(f"all products of a step of {M} tokens, ms", total)


def attention() -> None:
    rng = np.random.default_rng(0)
    for B, T, N, K, H, longest in SHAPES:
        page, P = 16, -(-longest // 16)
        pools = tuple(jnp.asarray(rng.normal(size=(B * P, page, K, H)).astype(np.float32)) for _ in "kv")
        lengths = np.full(B, longest, np.int32)
        table, at = (
            rng.permutation(B * P).reshape(B, P).astype(np.int32),
            lengths[:, None] - T + np.arange(T, dtype=np.int32),
        )
        q = jnp.asarray(rng.normal(size=(B, T, N, H)).astype(np.float32))
        inputs, score = (q, pools, *map(jnp.asarray, (table, lengths, at))), Score(H**-0.5)

        def by(name: str, inputs: Any = inputs, score: Score = score) -> Callable[[], Any]:
            compiled = jax.jit(lambda *arrays: PAGED_ATTENTION[name].run(*arrays, score))
            return lambda: compiled(*inputs)

        names = ["native", "blocked"] + ["rows"] * (T == 1)
        shown(
            f"{B} rows of {T}, {N} heads over {K} of {H}, {longest} tokens", medians({name: by(name) for name in names})
        )


if __name__ == "__main__":
    if (why := library.load(print)) or (sys.argv[1] == "training" and not library.has_amx()):
        raise SystemExit(f"no kernels: {why or 'this processor has no matrix units'}")
    {"products": products, "training": training, "attention": attention}[sys.argv[1]](*sys.argv[2:])
