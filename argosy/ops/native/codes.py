"""The layout of codes of few bits in panels, for products on a CPU (`codes.h`), and the numbers that codes stand for.

A panel has 32 columns. A group holds four codes of each column, or eight if codes have two bits. Four codes of a column are neighbors.
If codes have fewer than eight bits, columns c and c + 16 share bytes. With two bits, so do the two halves of a group.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

# The number of columns of a panel, equal to `PANEL` in tiles.h.
PANEL = 32
# The dtypes of 8-bit floats, by their name in `CodeFormat.numbers`.
FLOATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
NUMBERS = ("whole", "levels", *FLOATS)


@dataclass(frozen=True)
class CodeFormat:
    """The numbers that the codes of a weight stand for.

    bits: the number of bits of a code: 8, 4 or 2.
    zero: the zero point, which is subtracted from integers.
    numbers: the meaning of codes. whole: unsigned integers; levels: indexes of `levels`; e4m3, e5m2: the bits of an 8-bit float.
    levels: the 16 numbers that codes stand for, if `numbers` is levels.
    """

    bits: int
    zero: int = 0
    numbers: Literal["whole", "levels", "e4m3", "e5m2"] = "whole"
    levels: tuple[float, ...] = ()

    def decoded(self, codes: UInt8[Array, "*any"]) -> Float[Array, "*any"]:
        """Converts codes to numbers, in float32, without scales."""
        if self.numbers == "whole":
            return (codes.astype(jnp.int32) - self.zero).astype(jnp.float32)
        if self.numbers == "levels":
            return jnp.asarray(np.asarray(self.levels, np.float32))[codes.astype(jnp.int32)]
        return jax.lax.bitcast_convert_type(codes, FLOATS[self.numbers]).astype(jnp.float32)


def group_depth(bits: int) -> int:
    """Returns the number of codes of a column in a group."""
    return 8 if bits == 2 else 4


def group_bytes(bits: int) -> int:
    """Returns the number of bytes of a group."""
    return PANEL * group_depth(bits) * bits // 8


def block_groups(block: int, bits: int) -> int:
    """Returns the number of groups of a block of `block` codes. The last group is padded."""
    return -(-block // group_depth(bits))


def panel_layout(codes: np.ndarray, blocks: int, bits: int) -> np.ndarray:
    """Rearranges codes [columns summed] of whole panels to [panels groups bytes].

    Args:
        blocks: the number of equal blocks along the summed axis. Each block begins a new group.
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
    """Reads the codes of some columns from the layout of `panel_layout`.

    Args:
        panel, column: the panel of each column, and the index of the column within that panel.
        blocks, block: the number of blocks along the summed axis, and the number of codes of each block.
    """
    width = PANEL if bits == 8 else PANEL // 2
    fields = values.reshape(*values.shape[:2], width, 4)[panel, :, column % width]
    if bits < 8:
        half = (jnp.asarray(column) // width)[..., None, None].astype(jnp.uint8)
        shifts = [bits * (half + np.uint8(2 * later)) for later in range(group_depth(bits) // 4)]
        fields = jnp.concatenate([fields >> shift & np.uint8((1 << bits) - 1) for shift in shifts], -1)
    return fields.reshape(*fields.shape[:-2], blocks, -1)[..., :block].reshape(*fields.shape[:-2], -1)
