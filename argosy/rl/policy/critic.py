"""The critic of PPO: a second model beside the policy, trained with it.

It is stored as the attribute `critic` of the policy's module (`train.beside`). Its body starts as a copy of the initial policy, and its
head is drawn at random: an untrained head on a trained body learns values in few steps, a random body does not.
"""

from typing import Any

from argosy.train.beside import CRITIC

PREFIX = f"{CRITIC}."


def attach_critic(model: Any, config: Any, run: Any) -> None:
    """Adds a critic with the same settings to a policy's module. Its weights are not initialized yet."""
    model.critic = config.model_copy(update={"scores": 1}).build(run)
