"""Computes which rows of a batch each process reads. This module knows devices only as points of a grid.

The mesh axes that split rows cut a batch into positions. A process reads the positions of its devices. They need not be contiguous,
because on a torus a host is a block of neighboring chips, and neighboring chips are neighbors in the mesh. But two processes must read
either the same positions or none in common. Then each process reads one share of the rows from its data, in order, and its devices take
the rows in the order of their positions. So the rows of a batch have another order than with a single process. Losses depend on the
order only by rounding.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class RowPositions(NamedTuple):
    """The positions that processes read.

    of: the positions of each process, in ascending order.
    total: the number of positions of a batch.
    """

    of: dict[int, tuple[int, ...]]
    total: int

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """The distinct sets of positions that processes read, in the order of their first positions."""
        return sorted(set(self.of.values()))

    @property
    def divide(self) -> bool:
        """Whether the shares are equally large and cover each position of the batch once."""
        shares = self.shares
        return len({len(positions) for positions in shares}) == 1 and sum(len(positions) for positions in shares) == self.total


def row_positions(grid: Any, names: Sequence[str], rows: Sequence[str]) -> RowPositions:
    """Computes the positions that each process of a mesh reads.

    Args:
        grid: the array of devices.
        names: the names of the axes of the grid.
        rows: the names of the axes that split rows, the slowest-varying first.
    """
    import numpy as np

    split = [list(names).index(axis) for axis in rows]
    others = [i for i in range(grid.ndim) if i not in split]
    count = math.prod(grid.shape[i] for i in split)
    read: dict[int, set[int]] = {}
    for number, devices in enumerate(np.transpose(grid, split + others).reshape(count, -1)):
        for device in devices:
            read.setdefault(device.process_index, set()).add(number)
    return RowPositions({process: tuple(sorted(positions)) for process, positions in read.items()}, count)

