"""Decoupled clip and dynamic sampling (DAPO): Yu et al. 2025, arXiv:2503.14476.

    L_t = -min(ratio_t A_i, clip(ratio_t, 1 - 0.2, 1 + 0.28) A_i)        the mean over all tokens of the batch

A_i is GRPO's, the loss is PPO's with a higher upper clip. Dynamic sampling (`rollout.resample`) and the punishment of overlong answers
(`rollout.overlong`) are settings of rollouts, which the recipe `dapo` sets.
"""

from pydantic import Field

from argosy.rl.policy.settings import Average, Policy


class DAPO(Policy):
    """Decoupled clip and dynamic sampling (arXiv:2503.14476): clip-higher, and a mean over tokens. The recipe `dapo` adds dynamic
    sampling and the punishment of overlong answers."""

    high: float = Field(0.28, ge=0)
    average: Average = "tokens"
