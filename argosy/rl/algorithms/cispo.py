"""Clipped importance sampling policy optimization (CISPO): MiniMax 2025, arXiv:2506.13585.

    L_t = -sg(clip(ratio_t, low, high)) A_t log p_new(y_t)

PPO drops the gradient of clipped tokens, most of which are rare and decisive ("however", "wait"). CISPO keeps every token and bounds
its weight. sg stops the gradient. The paper normalizes by `TokenMean`.

`low` and `high` bound the ratio itself. The paper writes 1 + epsilon_high, tunes only that, and has no effective lower bound. The
default of 5 is the middle of the values that arXiv:2510.13786 found equally good (4, 5 and 8), and the value in TRL's documentation.
verl's default bounds are those of PPO, 1 - 0.2 and 1 + 0.2.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.rl.policy.settings import Average, LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.policy.token_losses import TokenLoss


class CISPO(Policy):
    """Clipped importance sampling (MiniMax-M1, arXiv:2506.13585): no token loses its gradient. The paper tunes the upper bound; 5 as
    in TRL."""

    loss: LossName = "cispo"
    low: float = Field(0.0, ge=0)
    high: float = Field(5.0, ge=0)
    average: Average = "tokens"


def cispo(
    new: "Float[Array, 'B T']",
    old: "Float[Array, 'B T']",
    advantages: "Float[Array, 'B #T']",
    mask: "Float[Array, 'B T']",
    *,
    low: float = 0.0,
    high: float = 5.0,
) -> "TokenLoss":
    """Computes the loss of each token by REINFORCE with bounded importance weights. Only its gradient is meaningful.

    Args:
        new: log-probabilities of the tokens under the trained policy.
        old: log-probabilities of the tokens under the policy at the start of the step.
        advantages: the advantage of each token [B T], or one per completion [B 1].

    Raises:
        BadInput: not 0 <= low <= 1 <= high.
    """
    import jax
    import jax.numpy as jnp

    from argosy.rl.policy.metrics import Metrics, mean_where
    from argosy.rl.policy.token_losses import TokenLoss, log_ratios, ratio_metrics, ratios

    if not 0 <= low <= 1 <= high:
        raise BadInput(f"a ratio clipped between {low} and {high}", hint="the bounds are of the ratio itself, such as 0 and 5")
    logs = log_ratios(new, old, mask)
    ratio = jax.lax.stop_gradient(ratios(logs))
    tokens = -jnp.clip(ratio, low, high) * advantages * jnp.where(mask > 0, new, 0.0)
    shares: Metrics = {
        "clip/low": mean_where((ratio < low).astype(mask.dtype), mask),
        "clip/high": mean_where((ratio > high).astype(mask.dtype), mask),
    }
    return TokenLoss(jnp.where(mask > 0, tokens, 0.0), ratio_metrics(logs, mask) | shares)
