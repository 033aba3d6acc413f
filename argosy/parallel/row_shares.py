"""Which rows of a batch each process reads. Knows devices only as the corners of a grid.

The axes of a mesh that split rows cut a batch into positions. A process reads those of its devices, which need not follow each other:
on a torus, neighbors of the mesh are neighbors of the chips, and a host is a block of them. What matters is that two processes read
the same positions or none in common. A process then reads one share of the rows from its data, in order, and its devices take them in
the order of their positions. So the rows of a batch stand in another order than without processes, which no loss depends on beyond
rounding.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class RowPositions(NamedTuple):
    """The positions that processes read.

    of: by process, in ascending order.
    total: number of positions.
    """

    of: dict[int, tuple[int, ...]]
    total: int

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """The distinct shares, in the order of their first positions."""
        return sorted(set(self.of.values()))

    @property
    def divide(self) -> bool:
        """Whether they cut the batch into equal shares."""
        shares = self.shares
        return len({len(positions) for positions in shares}) == 1 and sum(len(positions) for positions in shares) == self.total


def row_positions(grid: Any, names: Sequence[str], rows: Sequence[str]) -> RowPositions:
    """The positions of each process of a mesh.

    Args:
        grid: of devices.
        names: of its axes.
        rows: the axes that split rows, the slowest first.
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

