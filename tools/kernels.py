"""Which implementation of an op each platform takes, what each refuses, and what is known of its speed: docs/reference/kernels.md.

What is refused is asked of the implementations themselves; what is known of speed is written here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from argosy.ops import attention, grouped, matmul, video_convolution
from argosy.ops.attention import Score, See
from argosy.ops.attention import blocked as attention_blocked
from argosy.ops.attention import cudnn as attention_cudnn
from argosy.ops.attention import splash as attention_splash
from argosy.ops.attention.splash_blocks import INSTRUCTIONS, block_of
from argosy.ops.narrow import Narrow
from argosy.ops.paged import attention as paged_attention
from argosy.ops.paged import ragged as paged_ragged
from argosy.ops.paged import rows as paged_rows
from argosy.ops.paged import triton as paged_triton

Rows = Iterable[tuple[str, ...]]

PLATFORMS = {"cpu": "CPU", "gpu": "NVIDIA GPU", "tpu": "TPU"}
GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5": "v5p and others", "TPU v6 lite": "v6e"}

# What is known of speed. measured: timed on such a device. compiled: the compiler for the device takes it, and the figures are the
# compiler's. unknown: neither.
SPEED = {
    "attention": {
        "reference": "everywhere; scores of [B N T S] in memory",
        "blocked": "CPU: measured, 363 ms of attention in a step of a 31M model instead of 543; in both directions a seventh of the \
reference's CPU time at 2 x 1,024 tokens (`argosy/ops/attention/blocked.py`, `bidirectional.py`)",
        "ring": "over devices that share sequences (`mesh.context`), by XLA; never timed (`tests/ops/test_attention_ring.py`)",
        "splash": "TPU v5e, v5p, v6e: compiled, with gradients; never timed (`tests/ops/test_attention_tpu.py`)",
        "cudnn": "H200: measured, a training step 2.2 times as fast as with `reference` (docs/guides/gpus.md)",
    },
    "paged_attention": {
        "reference": "everywhere; reads all pages of a table",
        "blocked": "CPU: measured (docs/log)",
        "rows": "CPU: measured (docs/log)",
        "native": "CPU: measured (docs/log); needs its library",
        "triton": "H200: measured, 5 to 7 µs a layer of a 1.2B model (docs/guides/gpus.md)",
        "ragged": "TPU v5e, v5p, v6e: compiled (`tests/ops/test_paged_ragged.py`); never timed",
    },
    "products": {
        "xla": "everywhere",
        "amx": "CPU with AMX: measured, 1.4 times XLA's float32 (docs/log); one device, float32, training",
        "amx3": "CPU with AMX: measured, 2.2 times; a relative error of 4e-6. By name only",
    },
    "experts": {
        "ragged_dot": "TPU: compiled; in the gradient of the weights every row times every expert; GPU: not timed; CPU: so always",
        "blocked": "CPU: measured (docs/log)",
        "megablox": "TPU v5p: compiled (`tests/ops/test_grouped.py`); never timed; sizes below 1,024 must be multiples of 128",
        "tokamax": "TPU v5p: compiled where the package is installed; never timed",
    },
    "video_convolution": {
        "volumes": "everywhere",
        "frames": "CPU, float32: measured, 23 ms of CPU instead of 50 for 96 channels of 32 x 32, 71 instead of 206 with gradients",
    },
}  # fmt: skip

START = """\
Some operations have several implementations of the same function. A program takes the first that can do what a layer asks, in the \
order of the platform it is compiled for; `execution.attention`, `execution.products` and `execution.experts` name another, and then \
it is an error if that one cannot. `argosy autotune` [measures them](../guides/profiling.md#implementations-for-this-device) \
on a device, and new runs take the fastest. All equal the reference in value and gradient, up to rounding.

What is said of TPUs comes from their compilers. `measured`: timed on such a device; `compiled`: its compiler takes it."""
SEQUENCES = """\
What each can do on its platform, in bfloat16, or why not. `reference` can do everything. Kernels keep scores out of memory; what \
they leave for the backward pass is kept under every `execution.remat`, so they run once a step. On a mesh each device computes its \
own rows and heads; a number of devices that neither divides the key heads nor is a multiple of them is refused."""
BLOCKS = """\
`cudnn` reads segments as a mask of [B T T] numbers, shared by the heads. `splash` skips blocks that causality or a window hides, but \
computes those between segments. Rows whose segments share a prefix (`rollout.share_prompts`) are computed by `reference`, `blocked` \
and `cudnn`, with windows shorter than a row by `reference` alone. Sides of the blocks of `splash`, bfloat16, chosen for the \
least instructions in the programs that libtpu compiled (`argosy/ops/attention/splash_blocks.py`); not measured:"""
PAGES = """\
`blocked` can do everything. `native` is a library for CPUs: queries and pools in float32 or bfloat16, without chunks. `ragged` reads \
pools that hold keys and values joined, the others pools of their own; the engine allocates what is read."""

PRODUCTS = """\
A training step in float32 on one CPU device takes `amx` where the processor has matrix units, everything else `xla`. Each float32 is \
split into three bfloat16, whose sum it is exactly, and six products of the parts are summed: errors are of the size of those of \
XLA's float32. Infinities and numbers above 3.38e38 become NaN, and numbers below 1e-33 lose digits. Small products stay with XLA."""


def table(head: Rows, rows: Rows) -> str:
    lines = [*head, *rows]
    out = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([out[0], "|" + "---|" * len(lines[0]), *out[1:]])


def preferred(choices: Mapping[str, tuple[str, ...]]) -> str:
    rows = [(label, ", ".join(f"`{choice}`" for choice in choices[name])) for name, label in PLATFORMS.items()]
    return table([("program for", "tries in this order")], rows)


def then(choices: Mapping[str, tuple[str, ...]], last: str) -> dict[str, tuple[str, ...]]:
    return {name: (*choices.get(name, ()), last) for name in PLATFORMS}


def known(op: str) -> str:
    return table([("implementation", "what is known of its speed")], [(f"`{name}`", text) for name, text in SPEED[op].items()])


def refusals(cases: Mapping[str, tuple[Any, ...]], refusal_of: Mapping[str, Callable[..., str | None]]) -> str:
    """A row for each case: what each implementation says."""
    head = ("asked for", *(f"`{name}`" for name in refusal_of))
    rows = [(case, *(refuse(*arguments) or "yes" for refuse in refusal_of.values())) for case, arguments in cases.items()]
    return table([head], rows)


def attention_cases(B: int = 2, T: int = 1024) -> dict[str, tuple[Any, ...]]:
    """(q, k, v, see, score, lse) of what layers ask for, in bfloat16."""

    def ids(rows: int = B, n: int = T) -> Any:
        return jax.ShapeDtypeStruct((rows, n), jnp.int32)

    def arrays(H: int = 128, U: int = 0, dtype: Any = jnp.bfloat16, length: Any = T) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct((B, length, n, h), dtype) for n, h in ((8, H), (2, H), (2, U or H)))

    see, score, inputs = See(ids(), ids(), ids(), ids(), aligned=True), Score(0.1), arrays()
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    picked = replace(see, picked=jax.ShapeDtypeStruct((B, T, T), jnp.bool_))
    unknown = jax.export.symbolic_shape("T")[0]
    return {
        "causal, packed": (*inputs, see, score, False),
        "both directions": (*inputs, replace(see, causal=False), score, False),
        "a window": (*inputs, see, replace(score, window=128), False),
        "a window in both directions": (*inputs, replace(see, causal=False), replace(score, window=128), False),
        "chunks": (*inputs, see, replace(score, window=128, chunked=True), False),
        "a soft cap": (*inputs, see, replace(score, cap=30.0), False),
        "sinks": (*inputs, see, replace(score, sinks=sinks), False),
        "float32": (*arrays(dtype=jnp.float32), see, score, False),
        "heads of 80": (*arrays(80), see, score, False),
        "heads of 256": (*arrays(256), see, score, False),
        "keys of 192, values of 128": (*arrays(192, 128), see, score, False),
        "the log-sum-exp": (*inputs, see, score, True),
        "an indexer's choice of keys": (*inputs, picked, score, False),
        "new tokens against a cache": (*inputs, replace(see, aligned=False), score, False),
        "an unknown length": (*arrays(length=unknown), see, score, False),
    }


def paged_cases() -> dict[str, tuple[Any, ...]]:
    """(q, pools, table, lengths, score, lse) of what layers ask for, in bfloat16."""
    B, K = 8, 8

    def q(T: int = 1, H: int = 128) -> Any:
        return jax.ShapeDtypeStruct((B, T, 32, H), jnp.bfloat16)

    def pool(heads: int = K, dtype: Any = jnp.bfloat16, H: int = 128) -> Any:
        return jax.ShapeDtypeStruct((64, 16, heads, H), dtype)

    pages, lengths = jax.ShapeDtypeStruct((B, 32), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.int32)
    apart, score = (pool(), pool()), Score(0.1)
    narrow = Narrow(pool(dtype=jnp.uint8), jax.ShapeDtypeStruct((64, 16, K, 1), jnp.float32), "int8")
    sinks = jax.ShapeDtypeStruct((32,), jnp.float32)
    small = (pool(H=80), pool(H=80))
    return {
        "decoding": (q(), apart, pages, lengths, score, False),
        "a prompt's chunk of 512": (q(512), apart, pages, lengths, score, False),
        "a window": (q(), apart, pages, lengths, replace(score, window=128), False),
        "chunks": (q(), apart, pages, lengths, replace(score, window=128, chunked=True), False),
        "a soft cap": (q(), apart, pages, lengths, replace(score, cap=30.0), False),
        "sinks": (q(), apart, pages, lengths, replace(score, sinks=sinks), False),
        "heads of 80": (q(H=80), small, pages, lengths, score, False),
        "a quantized cache": (q(), (narrow, narrow), pages, lengths, score, False),
        "the log-sum-exp": (q(), apart, pages, lengths, score, True),
    }


def blocks() -> str:
    cases = {"whole": None, "window 128": 128, "window 1024": 1024, "window 4096": 4096}
    rows = [
        (GENERATIONS[kind], size, label, *(str(block_of(T, window, True, head, 2, kind)) for T in (1024, 4096, 32768)))
        for kind in INSTRUCTIONS
        for head, size in ((128, "to 128"), (256, "to 256"))
        for label, window in cases.items()
    ]
    return table([("TPU", "heads", "attention", "1,024 tokens", "4,096", "32,768")], rows)


def on_a_tpu(q: Any, pools: tuple[Any, ...], *rest: Any) -> str | None:
    """What the kernel for TPUs says to joined pools, which are what the engine allocates there."""
    if not isinstance(pools[0], Narrow):
        pages, page, K, H = pools[0].shape
        pools = (jax.ShapeDtypeStruct((pages, page, 2 * K, H), pools[0].dtype),)
    with jax.default_device("tpu"):
        return paged_ragged.RAGGED.refuses(q, pools, *rest)  # pyright: ignore[reportArgumentType]


def page() -> str:
    heads = {
        "blocked": attention_blocked.BLOCKED.refuses,
        "splash": attention_splash.splash_refusal,
        "cudnn": attention_cudnn.cudnn_refusal,
    }
    pages = {
        "rows": paged_rows.ROWS.refuses,
        "triton": lambda *arguments: paged_triton.triton_refusal(arguments[0], arguments[1], arguments[4]),
        "ragged": on_a_tpu,
    }
    ops = (attention.ATTENTION, paged_attention.PAGED_ATTENTION, matmul.MATMUL, grouped.GROUPED_MATMUL)
    for op in (*ops, video_convolution.VIDEO_CONVOLUTION):
        assert set(SPEED[op.key]) == set(op), op.key
    parts = (
        "# Kernels",
        START,
        "## Attention over whole sequences",
        preferred(then(attention.ATTENTION.prefer, "reference")),
        known("attention"),
        SEQUENCES,
        refusals(attention_cases(), heads),
        BLOCKS,
        blocks(),
        "## Attention over pages",
        preferred(then(paged_attention.PAGED_ATTENTION.prefer, "reference")),
        known("paged_attention"),
        PAGES,
        refusals(paged_cases(), pages),
        "## Products with weights",
        PRODUCTS,
        known("products"),
        "## Products of experts",
        preferred({name: grouped.GROUPED_MATMUL.prefer.get(name, ("ragged_dot",)) for name in PLATFORMS}),
        known("experts"),
        "## Convolutions of videos",
        preferred(then(video_convolution.VIDEO_CONVOLUTION.prefer, "volumes")),
        known("video_convolution"),
    )
    return "\n\n".join(parts) + "\n"
