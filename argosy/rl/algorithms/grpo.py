"""Group relative policy optimization (GRPO): Shao et al. 2024, arXiv:2402.03300, equation 3; and Dr. GRPO: arXiv:2503.20783.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)      GRPO, scale="group"
    A_i =  r_i - mean(r)                            Dr. GRPO, scale="none"

mean and std are over the completions of a prompt. Dividing by the group's std gives prompts that are nearly always solved or never
the largest advantages: Dr. GRPO's first bias. Its second is the length in the loss, see `argosy.rl.policy.token_losses.ConstantLength`.
scale="batch" divides by the std of all rewards of the step (arXiv:2508.08221).

Differences from the paper: the std is that of a sample (n - 1), as in TRL and verl, and epsilon is added. Difference from TRL 1.16:
epsilon is 1e-6 as in verl, not 1e-4, which shrinks the advantages of rewards that differ by as little. Differences from both: see
`argosy.rl.advantages.groups` on missing and equal rewards. A group of one completion gets the advantage 0; in verl it gets its reward.
"""

from typing import TYPE_CHECKING

from argosy.rl.policy.settings import Policy, Scale

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.advantages.groups import Advantages


class GRPO(Policy):
    """Group relative policy optimization (arXiv:2402.03300): rewards are compared with those of the prompt's other completions."""


def grpo(rewards: "Float[Array, 'g n']", *, scale: Scale = "group", epsilon: float = 1e-6) -> "Advantages":
    """Computes advantages relative to the group.

    Args:
        rewards: the reward of each completion; NaN where it is missing.
        epsilon: added to the standard deviation.
    """
    from argosy.rl.advantages.groups import groups

    of = groups(rewards)
    apart = of.rewards - of.mean
    if scale == "none":
        return of.advantages(apart)
    if scale == "group":
        return of.advantages(apart / (of.std + epsilon))
    return of.advantages(apart / (groups(rewards.reshape(1, -1)).std + epsilon))
