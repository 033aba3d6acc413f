"""Frozen models beside the trained one: an online reference, an online teacher. Each is an argument of every step, sharded by the rules
for its own weights.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """A frozen model.

    graph: its structure without weights; its architecture may differ from the trained model's.
    shapes: shapes of its weights by address, with shardings.
    shared: addresses of weights that are the trained model's own frozen weights, and take no extra memory.
    """

    graph: Any
    shapes: dict[str, Any]
    shared: frozenset[str] = frozenset()
