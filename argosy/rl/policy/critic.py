"""The critic of PPO: a second model beside the policy, trained with it.

The critic is the attribute `critic` of the policy's module (`train.beside`). Its body starts as a copy of the initial policy, and its
head is initialized at random. A random head on a trained body learns values in few steps; a random body does not.
"""

from typing import Any

from argosy.train.beside import CRITIC

PREFIX = f"{CRITIC}."


def attach_critic(model: Any, config: Any, run: Any) -> None:
    """Adds a critic to a policy's module, which is changed in place. The critic's weights are not initialized yet.

    Args:
        model: the policy's module.
        config: the policy's config; the critic has the same one with a head of one score.
        run: how layers are run, as the config's `build` takes it.
    """
    model.critic = config.model_copy(update={"scores": 1}).build(run)
