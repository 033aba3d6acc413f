"""Computes blocks, the groups of weights that share a scale.

A granularity is `tensor`, `channel`, a number of weights along the summed axes (32, 128), or a tile of the weight as a matrix, whose
rows are the summed axes (128x128). This module does not import jax, because settings are checked by it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.models.parts.einsum import Contraction

Granularity = str | int | None


def along(sizes: Sequence[int], block: int | None) -> list[int]:
    """Returns the size, along each axis, of a block of neighboring numbers on axes that are flattened to one, the last varying
    fastest. If such a block does not divide the axes, a smaller one that does is used.

    Args:
        sizes: the sizes of the axes.
        block: the number of numbers in a block. None means all.
    """
    if block is None:
        return list(sizes)
    out, rest = list[int](), block
    for size in reversed(sizes):
        each = size if rest >= size else next(n for n in range(rest, 0, -1) if size % n == 0)
        out.append(each)
        # A block that ends within this axis has a single entry of the axes before.
        rest = rest // size if rest >= size else 1
    return out[::-1]


def block_of(of: "Contraction", granularity: Granularity, default: int | None = None) -> tuple[int, ...]:
    """Returns the number of weights that share a scale along each axis of a contraction's weight. It is 1 along axes of stacked layers
    and of experts.

    Args:
        granularity: the granularity. None stands for `default`, or for a channel if that is None.
        default: the default block of the number format.

    Raises:
        ValueError: the granularity is invalid.
    """
    tile = granularity_of(granularity, default)
    summed = of.kept if of.is_lookup else of.inner
    outer = "".join(letter for letter in of.spec if letter not in summed + of.group)
    sizes = of.sizes
    shared = dict.fromkeys(of.spec, 1)
    for letters, block in ((summed, tile[0]), (outer, tile[1])):
        # In the order of the axes of the weight.
        letters = "".join(letter for letter in of.spec if letter in letters)
        shared |= dict(zip(letters, along([sizes[letter] for letter in letters], block), strict=True))
    return (*(1,) * of.stacked, *(shared[letter] for letter in of.spec))


def granularity_of(granularity: Granularity, default: int | None = None) -> tuple[int | None, int | None]:
    """Parses a granularity. Returns the numbers of weights that share a scale along the summed axes and along the kept axes, None for
    all.

    Raises:
        ValueError: the granularity is invalid.
    """
    if granularity is None:
        return default, 1
    text = str(granularity)
    if text in ("tensor", "channel"):
        return None, None if text == "tensor" else 1
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"granularity `{text}`: tensor, channel, a number such as 128, or a tile such as 128x128")
    return int(parts[0]), int(parts[1]) if len(parts) == 2 else 1


def pack_axis(of: "Contraction") -> int:
    """Returns the axis, as a negative index, along which codes of few bits are packed into bytes: the last summed axis."""
    summed = of.kept if of.is_lookup else of.inner
    return max(i for i, letter in enumerate(of.spec) if letter in summed) - len(of.spec)
