"""A weight as the matrices that it is: one for each layer and expert, summed axes by kept axes.

Optimizers of matrices keep factors of each matrix, [m, m] and [n, n]. In the state a factor has the axes of its weight, with 1 for
those that it does not have, and one more at the end: for a projection [L D N H], the left factor is [L D 1 1 m] and the right one
[L 1 N H n]. So a factor is sharded as its weight is, and its layers lead.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class MatrixView(NamedTuple):
    """The stored axes of a weight: those that count matrices, and those of a matrix's rows and columns."""

    lead: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, meaning: Any, stored: int, lookups: bool = False) -> "MatrixView | None":
        """The view of a weight, or None if it is no matrix.

        Args:
            lookups: whether embeddings, whose rows are looked up, count as matrices.
        """
        if not (meaning.inner if lookups else meaning.is_matrix):
            return None
        first = stored - len(meaning.letters)
        at = {letter: first + i for i, letter in enumerate(meaning.letters)}
        rows = tuple(at[a] for a in meaning.inner)
        columns = tuple(at[a] for a in meaning.letters if a not in meaning.inner + meaning.group)
        lead = tuple(i for i in range(stored) if i not in rows + columns)
        return cls(lead, rows, columns) if columns else None

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.lead, *self.rows, *self.columns)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of rows and columns of a matrix."""
        return math.prod(shape[i] for i in self.rows), math.prod(shape[i] for i in self.columns)

    def matrices(self, x: Any) -> Any:
        """The matrices [..., m, n] of a stored array."""
        return x.transpose(self.order).reshape(*(x.shape[i] for i in self.lead), *self.sizes(x.shape))

    def stored(self, matrices: Any, shape: tuple[int, ...]) -> Any:
        """The stored array of matrices."""
        return matrices.reshape([shape[i] for i in self.order]).transpose(self._inverse_order)

    def spread(self, factor: Any, shape: tuple[int, ...], side: tuple[int, ...]) -> Any:
        """A factor [..., k, k] of the rows or the columns (`side`), as it is kept in the state."""
        sizes = [shape[i] if i in self.lead or i in side else 1 for i in self.order]
        return factor.reshape(*sizes, factor.shape[-1]).transpose(*self._inverse_order, len(shape))

    def collected(self, factor: Any) -> Any:
        """A factor of the state as [..., k, k]."""
        transposed = factor.transpose(*self.order, factor.ndim - 1)
        return transposed.reshape(*transposed.shape[: len(self.lead)], -1, factor.shape[-1])

    @property
    def _inverse_order(self) -> tuple[int, ...]:
        return tuple(self.order.index(i) for i in range(len(self.order)))


def views_of(meanings: Mapping[str, tuple[Any, int]], lookups: bool = False) -> dict[str, MatrixView]:
    """The views of the weights that are matrices, by address."""
    return {a: view for a, (m, stored) in meanings.items() if (view := MatrixView.of(m, stored, lookups)) is not None}
