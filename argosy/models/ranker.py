"""A ranker of numbers and categories, as DLRM: the probability that a user clicks on an item.

    b = bottom(numbers)        e_f = E_f[categories_f]        z = top([b, <v_i, v_j> for i < j of b, e_1 ... e_F])

E_f is the embedding table of category f. All tables are concatenated in one array, whose rows are split over devices as a vocabulary is
(`vocab` of the mesh's rules). Naumov et al. 2019 (arXiv:1906.00091).

Differences from the paper: the widths of the layers are settings; z is a logit without an activation.
B batch, I numbers, F categories, V rows of all tables, D width of a row.
"""

from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field, field_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.hub.rows import table_rows


class RankerConfig(ModelConfig):
    """A ranker of numbers and categories (DLRM, arXiv:1906.00091)."""

    inputs: ClassVar[InputKind] = "clicks"

    numbers: int = Field(gt=0)
    """Number of numerical features I."""
    tables: tuple[int, ...] = Field(min_length=1)
    """Number of rows in the table of each category."""
    width: int = Field(gt=0)
    """Width of a table's row D, and of the output of the bottom layers."""
    bottom: tuple[int, ...] = ()
    """Widths of the hidden layers that read the numbers."""
    top: tuple[int, ...] = ()
    """Widths of the hidden layers that read the products of all pairs."""

    @field_validator("tables", "bottom", "top")
    @classmethod
    def _positive(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in sizes):
            raise ValueError("sizes are at least 1")
        return sizes

    @classmethod
    def examples(cls) -> dict[str, Any]:
        return {"small": cls(numbers=3, tables=(7, 5), width=6, bottom=(9,), top=(11, 4)), "flat": cls(numbers=2, tables=(8,), width=4)}

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each category's table in the array of all tables."""
        return (0, *accumulate(self.tables))[:-1]

    @property
    def id_spaces(self) -> tuple[int, ...]:
        return self.tables

    @property
    def dims(self) -> dict[str, int]:
        return {"V": sum(self.tables), "D": self.width, "F": len(self.tables)}

    @property
    def widths(self) -> dict[str, list[int]]:
        """The widths of the layers before the pairwise products ("bottom") and after them ("top"), from input to output."""
        vectors = len(self.tables) + 1
        pairs = vectors * (vectors - 1) // 2
        return {"bottom": [self.numbers, *self.bottom, self.width], "top": [self.width + pairs, *self.top, 1]}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.ranker import Ranker

        return Ranker(self)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return table_rows(self.dims, self.widths)

    def mixing_flops(self, tokens: int) -> int:
        return 2 * tokens * (len(self.tables) + 1) ** 2 * self.width
