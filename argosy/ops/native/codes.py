"""How codes of few bits lie in panels for the products of a CPU (`codes.h`), and what they stand for.

A group has four codes of each of 32 columns, eight where they have two bits, and the four codes of a column are neighbors. Columns c
and c + 16 share bytes where codes have less than eight bits, and so do the two halves of a group of two bits.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

# Columns of a panel; `PANEL` in tiles.h.
PANEL = 32
# The types of floats of eight bits, by the name that the kernels' `numbers` has.
FLOATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
NUMBERS = ("whole", "levels", *FLOATS)


@dataclass(frozen=True)
class CodeFormat:
    """What the codes of a weight stand for.

    bits: the room of a code: 8, 4 or 2.
    zero: what is subtracted from whole numbers.
    numbers: `whole` numbers from 0 on, places in `levels`, or the bits of a float: `e4m3`, `e5m2`.
    levels: 16 numbers.
    """

    bits: int
    zero: int = 0
    numbers: Literal["whole", "levels", "e4m3", "e5m2"] = "whole"
    levels: tuple[float, ...] = ()

    def decoded(self, codes: UInt8[Array, "*any"]) -> Float[Array, "*any"]:
        """The numbers, float32."""
        if self.numbers == "whole":
            return (codes.astype(jnp.int32) - self.zero).astype(jnp.float32)
        if self.numbers == "levels":
            return jnp.asarray(np.asarray(self.levels, np.float32))[codes.astype(jnp.int32)]
        return jax.lax.bitcast_convert_type(codes, FLOATS[self.numbers]).astype(jnp.float32)


def group_depth(bits: int) -> int:
    """The codes of a column in a group."""
    return 8 if bits == 2 else 4


def group_bytes(bits: int) -> int:
    """The bytes of a group."""
    return PANEL * group_depth(bits) * bits // 8


def block_groups(block: int, bits: int) -> int:
    """The groups of a block; the last one is filled up."""
    return -(-block // group_depth(bits))


def panel_layout(codes: np.ndarray, blocks: int, bits: int) -> np.ndarray:
    """Codes [columns summed] of whole panels as [panels groups bytes].

    Args:
        blocks: of equal length along the summed axis, each of which begins a group.
    """
    panels, block, deep = len(codes) // PANEL, codes.shape[1] // blocks, group_depth(bits)
    parts = codes.reshape(panels, PANEL, blocks, block)
    if rest := -block % deep:
        parts = np.concatenate([parts, np.zeros((panels, PANEL, blocks, rest), np.uint8)], 3)
    parts = parts.reshape(panels, PANEL, -1, deep).transpose(0, 2, 1, 3)
    if bits < 8:
        half = PANEL // 2
        fields = [parts[:, :, c : c + half, j : j + 4] for j in range(0, deep, 4) for c in (0, half)]
        parts = fields[0].copy()
        for i, field in enumerate(fields[1:], 1):
            parts |= field << (bits * i)
    return np.ascontiguousarray(parts).reshape(panels, -1, group_bytes(bits))


def some_codes(values: Array, panel: Any, column: Any, blocks: int, block: int, bits: int) -> UInt8[Array, "... summed"]:
    """The codes of some columns of a weight that was laid out.

    Args:
        panel, column: the panel of each, and the column there.
        blocks, block: how many blocks there are along the summed axis, and the codes of each.
    """
    width = PANEL if bits == 8 else PANEL // 2
    fields = values.reshape(*values.shape[:2], width, 4)[panel, :, column % width]
    if bits < 8:
        half = (jnp.asarray(column) // width)[..., None, None].astype(jnp.uint8)
        shifts = [bits * (half + np.uint8(2 * later)) for later in range(group_depth(bits) // 4)]
        fields = jnp.concatenate([fields >> shift & np.uint8((1 << bits) - 1) for shift in shifts], -1)
    return fields.reshape(*fields.shape[:-2], blocks, -1)[..., :block].reshape(*fields.shape[:-2], -1)
