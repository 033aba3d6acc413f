"""Parts that are trained beside a model and are no part of it: the critic of PPO, the projection of distillation, and what delayed
scaling remembers.

Such a part is an attribute of the model's module, so its weights are placed, trained and optimized like others, under addresses that
begin with its name. A checkpoint keeps them with the optimizer's state, apart from the weights that whoever loads the run reads. What
a run starts from does not have them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from argosy.adapt.settings import AMAX

T = TypeVar("T")
CRITIC, PROJECTION = "critic", "projection"
PARTS = (CRITIC, PROJECTION, AMAX)


def is_beside(address: str) -> bool:
    """Whether a weight belongs to such a part."""
    return address.split(".", 1)[0] in PARTS


def split_parts(by_address: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Splits a mapping by address: the model's entries, and those of parts beside it."""
    of_model = {address: leaf for address, leaf in by_address.items() if not is_beside(address)}
    return of_model, {address: leaf for address, leaf in by_address.items() if address not in of_model}


@contextmanager
def alone(model: Any) -> Iterator[dict[str, Any]]:
    """The parts beside a model, by name; inside, its module is without them."""
    parts = {name: getattr(model, name) for name in PARTS if hasattr(model, name)}
    for name in parts:
        delattr(model, name)
    try:
        yield parts
    finally:
        for name, part in parts.items():
            setattr(model, name, part)
