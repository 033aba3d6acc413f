"""How large the blocks of the splash kernels are: for a length, a window, a size of heads and a kind of TPU.

The figures were compiled, not measured: instructions that libtpu 0.0.42 schedules for one block in the forward and the two backward
kernels, by `bench/splash_blocks.py`, bfloat16, segments, no cap. An instruction takes a cycle or more. Large blocks need a third
fewer of them for each score, small ones compute fewer scores that a window or causality hides.
"""

from collections.abc import Mapping
from typing import Any

# Instructions for a block of queries and keys, of the three kernels together, by the side of the block. Heads of at most 128, of 256.
INSTRUCTIONS: Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]] = {
    "TPU v5 lite": ({128: 1478, 256: 2797, 512: 6117, 1024: 20369}, {128: 2050, 256: 3884, 512: 10994, 1024: 37951}),
    "TPU v5": ({128: 1929, 256: 3260, 512: 6623, 1024: 21197}, {128: 2421, 256: 4263, 512: 11688, 1024: 38456}),
    "TPU v6 lite": ({128: 1325, 256: 2511, 512: 4449, 1024: 14097}, {128: 1729, 256: 2789, 512: 4974, 1024: 15196}),
}
# For other TPUs.
LIKE = "TPU v5"
# The largest side on TPUs with less fast memory: at 1024 the compiler refuses float32, and heads of 256, on a v4.
LARGEST = {"TPU v4": 512}
# What starting a block costs the three kernels beside that: 0.35 us each (the Pallas guide on pipelining), at 1.5 GHz.
START = 1500
# Keys that are computed at once: more need as many instructions and more of the fast memory.
AT_ONCE = 512
# The most bytes of a block of keys; more were not compiled. A program whose blocks do not fit in fast memory is an error of XLA.
MOST_BYTES = 1 << 20


def block_of(T: int, window: int | None, causal: bool, head: int, bytes_each: int, kind: str) -> int:
    """The side of a block: the one with the least instructions for all blocks that are computed.

    Args:
        head: the size of a head, padded.
        bytes_each: of a number.
        kind: of the device, as JAX names it.
    """
    costs = INSTRUCTIONS.get(kind, INSTRUCTIONS[LIKE])[head > 128]
    sides = [side for side in costs if side <= LARGEST.get(kind, side)]
    fit = [side for side in sides if side * head * bytes_each <= MOST_BYTES] or [min(sides)]
    return min(fit, key=lambda side: count_blocks(-(-T // side), side, window, causal) * (costs[side] + START))


def count_blocks(n: int, side: int, window: int | None, causal: bool) -> int:
    """How many of n x n blocks some query sees."""
    reach = n - 1 if window is None else min(n - 1, -(-(window - 1) // side))
    below = sum(min(i, reach) for i in range(n))
    return n + below * (1 if causal else 2)


def block_sizes(side: int) -> dict[str, Any]:
    """The arguments of JAX's `BlockSizes`."""
    blocks: dict[str, Any] = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), side)
    return blocks | dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(side, AT_ONCE))
