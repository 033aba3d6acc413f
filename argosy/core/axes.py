"""The grammar of the `reading` of a row in `core.keymap`: it names the axes of the tensors on both sides. From this follow the reshapes
and transposes between them.

One side of a row is a single fused tensor, and the other side is its pieces. So two functions convert every layout in both directions,
with a reshape, a slice and a transpose. The result is a view where possible. `core.keymap` has examples of the grammar. This module
knows neither tensor names nor files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from argosy.core.formats import Shape

if TYPE_CHECKING:
    import numpy as np

_TOKEN = re.compile(r"[A-Za-z_]\w*|1\b|[()|]")

Names = tuple[str, ...]
# The pieces of an axis that is cut. The size of each piece is the product of the sizes of its names.
Cut = tuple[Names, ...]
Sizes = Mapping[str, int]


class Axes(NamedTuple):
    """The axes of one tensor. The size of an axis is the product of the sizes of its names, of which one may be a `Cut`."""

    axes: tuple[tuple[str | Cut, ...], ...]

    @property
    def leaves(self) -> tuple[str | Cut, ...]:
        return tuple(leaf for axis in self.axes for leaf in axis)

    @property
    def cut(self) -> Cut:
        """The pieces of the axis that is cut; empty if no axis is cut."""
        return next((leaf for leaf in self.leaves if isinstance(leaf, tuple)), ())

    def names(self, piece: int = 0) -> Names:
        """All axis names in order. The names of the piece with this index replace the cut."""
        return tuple(name for leaf in self.leaves for name in (leaf[piece] if isinstance(leaf, tuple) else (leaf,)))

    def shape(self, sizes: Sizes) -> Shape:
        return tuple(math.prod(_size(leaf, sizes) for leaf in axis) for axis in self.axes)

    def flat(self, sizes: Sizes) -> Shape:
        return tuple(_size(leaf, sizes) for leaf in self.leaves)


def _size(leaf: str | Cut, sizes: Sizes) -> int:
    if isinstance(leaf, str):
        return sizes[leaf]
    return sum(math.prod(sizes[name] for name in piece) for piece in leaf)


def _axes(text: str) -> Axes:
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise ValueError(f"`{text}` may only contain names, 1, ( ) and |")
    axes = []
    while tokens:
        axes.append(tuple(_axis(tokens)))
    parsed = Axes(tuple(axes))
    if sum(isinstance(leaf, tuple) for leaf in parsed.leaves) > 1:
        raise ValueError(f"`{text}` cuts two axes")
    return parsed


def _axis(tokens: list[str]) -> list[str | Cut]:
    """Removes the tokens of the next axis from `tokens`, and parses them."""
    token = tokens.pop(0)
    if token in ")|":
        raise ValueError(f"`{token}` outside of parentheses")
    if token != "(":
        return [] if token == "1" else [token]
    pieces: list[list[str | Cut]] = [[]]
    while tokens and tokens[0] != ")":
        if tokens[0] == "|":
            tokens.pop(0)
            pieces.append([])
        else:
            pieces[-1] += _axis(tokens)
    if not tokens:
        raise ValueError("a parenthesis is not closed")
    tokens.pop(0)
    if len(pieces) == 1:
        return pieces[0]
    cut = tuple(tuple(name for name in piece if isinstance(name, str)) for piece in pieces)
    if sum(map(len, cut)) < sum(map(len, pieces)):
        raise ValueError("a cut inside a cut")
    return [cut]


class Rearrangement(NamedTuple):
    """The axes of the tensors on both sides of a row. One side is a single fused tensor, and the other side is its pieces."""

    left: tuple[Axes, ...]
    right: tuple[Axes, ...]

    @staticmethod
    def parse(text: str) -> "Rearrangement":
        left, _, right = text.partition("->")
        return Rearrangement(tuple(map(_axes, left.split(","))), tuple(map(_axes, right.split(","))))

    def check(self, sizes: Sizes) -> None:
        """Raises ValueError unless each piece has the same names on both sides, each name once, and all names have a size."""
        one_sided, parts = (self.left, self.right) if len(self.left) == 1 else (self.right, self.left)
        fused, *more = one_sided
        if more or any(part.cut for part in parts) or max(1, len(fused.cut)) != len(parts):
            raise ValueError("one side must be a single tensor, the other side one tensor for each of its pieces")
        for i, part in enumerate(parts):
            a, b = fused.names(i), part.names()
            if len(set(a)) < len(a) or sorted(a) != sorted(b):
                raise ValueError(f"[{' '.join(a)}] on one side, [{' '.join(b)}] on the other")
            if unknown := set(a) - set(sizes):
                raise ValueError(f"no size for {', '.join(sorted(unknown))}")


def move(
    arrays: Sequence[np.ndarray], source: Sequence[Axes], target: Sequence[Axes], i: int, sizes: Sizes
) -> np.ndarray:
    """Makes the `i`-th tensor of the target side from all tensors of the source side.

    Args:
        arrays: the tensors of the source side.
        source, target: the axes of the tensors on each side.
        sizes: the sizes of the axes by name.
    """
    if len(source) == 1:
        return _piece(arrays[0], source[0], i, target[i], sizes)
    return _fused(arrays, source, target[0], sizes)


def _piece(array: np.ndarray, fused: Axes, i: int, part: Axes, sizes: Sizes) -> np.ndarray:
    import numpy as np

    x = array.reshape(fused.flat(sizes))
    if cut := fused.cut:
        axis, start = fused.leaves.index(cut), _size(cut[:i], sizes)
        x = np.moveaxis(np.moveaxis(x, axis, 0)[start : start + _size(cut[i : i + 1], sizes)], 0, axis)
    names = fused.names(i)
    x = x.reshape([sizes[name] for name in names])
    return x.transpose([names.index(name) for name in part.names()]).reshape(part.shape(sizes))


def _fused(arrays: Sequence[np.ndarray], parts: Sequence[Axes], fused: Axes, sizes: Sizes) -> np.ndarray:
    import numpy as np

    axis, flat = fused.leaves.index(fused.cut), fused.flat(sizes)
    pieces = []
    for i, (array, part) in enumerate(zip(arrays, parts)):
        names = part.names()
        x = array.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in fused.names(i)])
        pieces.append(x.reshape(*flat[:axis], _size(fused.cut[i : i + 1], sizes), *flat[axis + 1 :]))
    return np.concatenate(pieces, axis).reshape(fused.shape(sizes))
