"""Views weights as matrices: one matrix for each layer and expert, with summed axes (inputs) as rows and kept axes (outputs) as
columns.

Optimizers of matrices keep factors of each matrix [m, n], which are [m, m] and [n, n]. In the state a factor has all axes of its
weight, with size 1 for axes of the other side, and one more axis at the end. For a projection [L D N H], the left factor is [L D 1 1 m]
and the right factor is [L 1 N H n]. So a factor is sharded as its weight is, and the axis of layers comes first.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class MatrixView(NamedTuple):
    """A view of a weight as matrices, by the indices of its stored axes.

    lead: the axes that count matrices, such as layers and experts.
    rows: the axes that form the rows of a matrix.
    columns: the axes that form the columns of a matrix.
    """

    lead: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, meaning: Any, stored: int, lookups: bool = False) -> "MatrixView | None":
        """Makes the view of a weight. Returns None if it is no matrix.

        Args:
            meaning: the meaning of the weight.
            stored: the number of stored axes.
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
        """Returns the numbers of rows and of columns of a matrix, from the stored shape of the weight."""
        return math.prod(shape[i] for i in self.rows), math.prod(shape[i] for i in self.columns)

    def matrices(self, x: Any) -> Any:
        """Converts a stored array to matrices [..., m, n]."""
        return x.transpose(self.order).reshape(*(x.shape[i] for i in self.lead), *self.sizes(x.shape))

    def stored(self, matrices: Any, shape: tuple[int, ...]) -> Any:
        """Converts matrices [..., m, n] to a stored array of this shape."""
        return matrices.reshape([shape[i] for i in self.order]).transpose(self._inverse_order)

    def spread(self, factor: Any, shape: tuple[int, ...], side: tuple[int, ...]) -> Any:
        """Converts a factor [..., k, k] to the layout of the state.

        Args:
            shape: the stored shape of the weight.
            side: the axes that the factor belongs to, `rows` or `columns`.
        """
        sizes = [shape[i] if i in self.lead or i in side else 1 for i in self.order]
        return factor.reshape(*sizes, factor.shape[-1]).transpose(*self._inverse_order, len(shape))

    def collected(self, factor: Any) -> Any:
        """Converts a factor in the layout of the state to [..., k, k]."""
        transposed = factor.transpose(*self.order, factor.ndim - 1)
        return transposed.reshape(*transposed.shape[: len(self.lead)], -1, factor.shape[-1])

    @property
    def _inverse_order(self) -> tuple[int, ...]:
        return tuple(self.order.index(i) for i in range(len(self.order)))


def views_of(meanings: Mapping[str, tuple[Any, int]], lookups: bool = False) -> dict[str, MatrixView]:
    """Returns the views of the weights that are matrices, by parameter name."""
    return {a: view for a, (m, stored) in meanings.items() if (view := MatrixView.of(m, stored, lookups)) is not None}
