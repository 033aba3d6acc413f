"""The critic of PPO: a second model beside the policy, trained with it.

It is a part beside the policy (`train.beside`), the attribute `critic` of its module. Its body begins as a copy of the first weights,
its head is drawn: an untrained head of a trained body learns values in few steps, a random body does not.
"""

from typing import Any

from argosy.train.beside import CRITIC

PREFIX = f"{CRITIC}."


def attach_critic(model: Any, config: Any, run: Any) -> None:
    """Gives a policy's module a critic of the same settings, whose weights are not there yet."""
    model.critic = config.model_copy(update={"scores": 1}).build(run)
