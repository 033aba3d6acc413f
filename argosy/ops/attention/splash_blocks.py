"""Chooses the block size of the splash kernels, for a length, a window, a head size and a kind of TPU.

The choice is based on compilation, not on measurement: the instructions that libtpu 0.0.42 schedules for one block in the forward and
the two backward kernels (`bench/splash_blocks.py`; bfloat16, segments, no cap). An instruction takes at least one cycle. Large blocks
need a third fewer instructions for each score. Small blocks compute fewer scores that are masked by a window or by causality.
"""

from collections.abc import Mapping
from typing import Any

# By kind of TPU: the instructions of all three kernels for a block, by the side of the block, for heads of at most 128 and of 256.
INSTRUCTIONS: Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]] = {
    "TPU v5 lite": ({128: 1478, 256: 2797, 512: 6117, 1024: 20369}, {128: 2050, 256: 3884, 512: 10994, 1024: 37951}),
    "TPU v5": ({128: 1929, 256: 3260, 512: 6623, 1024: 21197}, {128: 2421, 256: 4263, 512: 11688, 1024: 38456}),
    "TPU v6 lite": ({128: 1325, 256: 2511, 512: 4449, 1024: 14097}, {128: 1729, 256: 2789, 512: 4974, 1024: 15196}),
}
# The kind of TPU whose figures are used for other kinds.
LIKE = "TPU v5"
# The largest side on TPUs with less fast memory. On a v4, the compiler refuses a side of 1024 for float32, and for heads of 256.
LARGEST = {"TPU v4": 512}
# The additional cost of starting a block in the three kernels, in cycles: 0.35 us each (Pallas guide on pipelining), at 1.5 GHz.
START = 1500
# The number of keys that are computed at once. More keys take as many instructions for each key, but more fast memory.
AT_ONCE = 512
# The most bytes of a block of keys. Larger blocks were not compiled. XLA refuses programs whose blocks do not fit in fast memory.
MOST_BYTES = 1 << 20


def block_of(T: int, window: int | None, causal: bool, head: int, bytes_each: int, kind: str) -> int:
    """Returns the side of a block for which all blocks that are computed take the fewest instructions.

    Args:
        T: the length of the sequence.
        head: the head size, padded.
        bytes_each: the bytes of one number.
        kind: the kind of device, as JAX names it.
    """
    costs = INSTRUCTIONS.get(kind, INSTRUCTIONS[LIKE])[head > 128]
    sides = [side for side in costs if side <= LARGEST.get(kind, side)]
    fit = [side for side in sides if side * head * bytes_each <= MOST_BYTES] or [min(sides)]
    return min(fit, key=lambda side: count_blocks(-(-T // side), side, window, causal) * (costs[side] + START))


def count_blocks(n: int, side: int, window: int | None, causal: bool) -> int:
    """Counts the blocks, of n x n blocks, of which any score is seen."""
    reach = n - 1 if window is None else min(n - 1, -(-(window - 1) // side))
    below = sum(min(i, reach) for i in range(n))
    return n + below * (1 if causal else 2)


def block_sizes(side: int) -> dict[str, Any]:
    """Returns the arguments of JAX's `BlockSizes`."""
    blocks: dict[str, Any] = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), side)
    return blocks | dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(side, AT_ONCE))
