"""Proximal policy optimization (PPO): Schulman et al. 2017, arXiv:1707.06347, equation 7. Also the loss of GRPO, Dr. GRPO, DAPO.

    ratio_t = p_new(y_t) / p_old(y_t)
    L_t = -min(ratio_t A_t, clip(ratio_t, 1 - low, 1 + high) A_t)
    with dual, where A_t < 0:  min(L_t, -dual A_t)

- high > low is DAPO's clip-higher (arXiv:2503.14476: 0.2 and 0.28): unlikely tokens may become likelier before they are clipped.
- dual is dual-clip PPO (arXiv:1912.09729: 3): without it, a bad token whose ratio has exploded gives an unbounded loss. `delta` in
  TRL is the same bound.

Differences: verl clips log-ratios at -20 and 20, here only at 20, since small ratios do no harm. verl sets dual = 3 unless told
otherwise; here it is off, as in the papers of PPO, GRPO and DAPO.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from argosy.rl.policy.settings import Average, Critic, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.policy.token_losses import TokenLoss


class PPO(Policy):
    """Proximal policy optimization with a critic (arXiv:1707.06347; of language models: arXiv:2203.02155)."""

    average: Average = "tokens"
    kl: float = Field(0.05, ge=0)
    kl_in: Literal["loss", "reward"] = "reward"
    critic: Critic | None = Critic()

    @model_validator(mode="after")
    def _has_critic(self) -> "PPO":
        if self.critic is None:
            raise ValueError("critic is missing: PPO without one is objective=grpo, or objective=reinforce_pp")
        return self


def ppo(
    new: "Float[Array, 'B T']",
    old: "Float[Array, 'B T']",
    advantages: "Float[Array, 'B #T']",
    mask: "Float[Array, 'B T']",
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> "TokenLoss":
    """The clipped loss of each token.

    Args:
        new, old: log-probabilities of the tokens by the trained policy, and by the policy at the start of the step.
        advantages: of tokens, or of rows [B 1].

    Raises:
        BadInput: a bound that clips everything or nothing.
    """
    import jax.numpy as jnp

    from argosy.rl.policy.token_losses import (
        TokenLoss,
        clip_metrics,
        clipped_objective,
        log_ratios,
        ratio_metrics,
        ratios,
    )

    logs = log_ratios(new, old, mask)
    ratio = ratios(logs)
    tokens = jnp.where(mask > 0, clipped_objective(ratio, advantages, low, high, dual), 0.0)
    return TokenLoss(tokens, ratio_metrics(logs, mask) | clip_metrics(ratio, advantages, mask, low, high, dual))
