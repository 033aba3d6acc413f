"""Proximal policy optimization (PPO): Schulman et al. 2017, arXiv:1707.06347, equation 7. GRPO, Dr. GRPO and DAPO use its loss too.

    ratio_t = p_new(y_t) / p_old(y_t)
    L_t = -min(ratio_t A_t, clip(ratio_t, 1 - low, 1 + high) A_t)
    with dual, where A_t < 0:  min(L_t, -dual A_t)

- high > low is DAPO's clip-higher (arXiv:2503.14476 has 0.2 and 0.28). It lets unlikely tokens become likelier before they are clipped.
- dual is the bound of dual-clip PPO (arXiv:1912.09729 has 3). Without it, a token of negative advantage whose ratio has exploded gives
  an unbounded loss. `delta` in TRL is the same bound.

Differences from verl: it clips log-ratios at -20 and 20. Here they are clipped only at 20, since small ratios do no harm. The default
of dual is 3 in verl. Here it is off, as in the papers of PPO, GRPO and DAPO.
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
    """Computes the clipped loss of each token.

    Args:
        new: log-probabilities of the tokens under the trained policy.
        old: log-probabilities of the tokens under the policy at the start of the step.
        advantages: the advantage of each token [B T], or one per completion [B 1].

    Raises:
        BadInput: a bound clips every ratio or none.
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
