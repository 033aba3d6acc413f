"""Frozen models that every step reads, such as an online reference or an online teacher. The weights of each are an argument of the
step, sharded by the rules for its own axes.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """A frozen model that steps read.

    graph: the structure of the model without weights. Its architecture may differ from the trained model's.
    shapes: the shapes of its weights with their shardings, by parameter name.
    shared: the names of weights that are also frozen weights of the trained model, so they take no further memory.
    """

    graph: Any
    shapes: dict[str, Any]
    shared: frozenset[str] = frozenset()
