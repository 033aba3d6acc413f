"""Dr. GRPO: Liu et al. 2025, arXiv:2503.20783. GRPO without its two biases.

    A_i = r_i - mean(r)        the loss of an answer is the sum over its tokens divided by a constant

Dividing by the standard deviation of a group favors prompts that are nearly always or never solved; dividing by an answer's length
punishes long wrong answers less. The advantages are `grpo` with scale="none", the mean is `ConstantLength`.
"""

from typing import Literal

from argosy.rl.policy.settings import Average, Policy


class DrGRPO(Policy):
    """GRPO without its two biases (arXiv:2503.20783): advantages are not divided by the std, answers not by their length."""

    scale: Literal["group", "batch", "none"] = "none"
    average: Average = "sums"
