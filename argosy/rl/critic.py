"""The critic of PPO: a second model beside the policy, trained with it.

It is the attribute `critic` of the policy's module, so its weights are trained, placed and saved like others, under addresses that
begin with `critic.`. A checkpoint keeps them apart from the model's, which whoever loads the run reads. Its body begins as a copy of
the first weights, its head is drawn: an untrained head of a trained body learns values in few steps, a random body does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PREFIX = "critic."


def attach(model: Any, config: Any, run: Any) -> None:
    """Gives a policy's module a critic of the same settings, whose weights are not there yet."""
    model.critic = config.model_copy(update={"scores": 1}).build(run)


@contextmanager
def apart(model: Any) -> Iterator[Any]:
    """The critic of a module, or None; inside, the module is without it."""
    critic = getattr(model, "critic", None)
    if critic is None:
        yield None
        return
    del model.critic
    try:
        yield critic
    finally:
        model.critic = critic
