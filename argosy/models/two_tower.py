"""A two-tower model for retrieval: each user and each item has a vector, and their cosine is the score of the pair.

    u = unit(user([U[id], numbers]))        v = unit(item(I[id]))        score = u . v / temperature

For retrieval, the user's vector is computed once, and the nearest items are looked up. `objective=retrieve` trains with the items of
the batch as negatives. Covington, Adams and Sargin 2016 (Deep neural networks for YouTube recommendations); Yi et al. 2019
(Sampling-bias-corrected neural modeling for large corpus item recommendations); Yang et al. 2020 (Mixed negative sampling).

B batch, I numbers, V rows of both tables, D width of a row, O width of a vector.
"""

from typing import Any, ClassVar

from pydantic import Field

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.hub.rows import table_rows


class TwoTowerConfig(ModelConfig):
    """Two towers for retrieval."""

    inputs: ClassVar[InputKind] = "clicks"

    numbers: int = Field(gt=0)
    """Number of numerical features of a user I."""
    users: int = Field(gt=0)
    """Number of rows in the table of users."""
    items: int = Field(gt=0)
    """Number of rows in the table of items."""
    width: int = Field(gt=0)
    """Width of a table's row D."""
    hidden: tuple[int, ...] = ()
    """Widths of the hidden layers of each tower."""
    output: int = Field(gt=0)
    """Width of an output vector O."""
    temperature: float = Field(0.1, gt=0)
    """Divides cosines. Smaller values separate similar items more."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        sizes: dict[str, Any] = {"numbers": 3, "users": 7, "items": 5, "width": 6, "output": 4}
        return {"small": cls(**sizes, hidden=(9,)), "flat": cls(**sizes)}

    @property
    def id_spaces(self) -> tuple[int, ...]:
        return (self.users, self.items)

    @property
    def dims(self) -> dict[str, int]:
        return {"V": self.users + self.items, "D": self.width}

    @property
    def widths(self) -> dict[str, list[int]]:
        """The widths of each tower's layers, from input to output."""
        return {"user": [self.width + self.numbers, *self.hidden, self.output], "item": [self.width, *self.hidden, self.output]}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.two_tower import TwoTower

        return TwoTower(self)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return table_rows(self.dims, self.widths)

    def mixing_flops(self, tokens: int) -> int:
        return 2 * tokens * self.output
