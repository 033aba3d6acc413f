"""Auxiliary modules that are trained with a model but do not belong to it: the critic of PPO, the projection of distillation, and the
histories of delayed scaling.

Such a module is an attribute of the model's module, so its weights are sharded and optimized like others. Their parameter names begin
with the name of the attribute. A checkpoint stores them with the optimizer's state, apart from the model's weights, so nobody who loads
the model sees them. The weights that a run starts from do not contain them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from argosy.adapt.settings import AMAX

T = TypeVar("T")
CRITIC, PROJECTION = "critic", "projection"
PARTS = (CRITIC, PROJECTION, AMAX)


def is_beside(address: str) -> bool:
    """Whether a parameter of this name belongs to an auxiliary module."""
    return address.split(".", 1)[0] in PARTS


def split_parts(by_address: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Splits a mapping by parameter name into the model's entries and those of auxiliary modules."""
    of_model = {address: leaf for address, leaf in by_address.items() if not is_beside(address)}
    return of_model, {address: leaf for address, leaf in by_address.items() if address not in of_model}


@contextmanager
def alone(model: Any) -> Iterator[dict[str, Any]]:
    """Removes the auxiliary modules from a model's module inside a `with` block. Yields them by name."""
    parts = {name: getattr(model, name) for name in PARTS if hasattr(model, name)}
    for name in parts:
        delattr(model, name)
    try:
        yield parts
    finally:
        for name, part in parts.items():
            setattr(model, name, part)
