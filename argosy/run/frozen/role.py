"""Frozen models beside the trained one: an online reference, an online teacher. Each is an argument of every step, laid out over the
devices as the rules say for its own weights.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """A frozen model.

    graph: of the model, which may be of another architecture than the trained one. shapes: its weights by address, with shardings.
    shared: the addresses of weights that are the trained model's own frozen ones, and take no memory of their own.
    """

    graph: Any
    shapes: dict[str, Any]
    shared: frozenset[str] = frozenset()
