"""Group sequence policy optimization (GSPO) in its form for tokens: Zheng et al. 2025, arXiv:2507.18071, equations 13 and 14.

    s_i  = exp(mean over tokens of log(p_new(y_t) / p_old(y_t)))
    s_it = sg(s_i) p_new(y_t) / sg(p_new(y_t))
    L_it = -min(s_it A_it, clip(s_it, 1 - low, 1 + high) A_it)

sg stops the gradient. If all tokens of a row have the same advantage, the mean of L_it over them has the value and the gradient of GSPO
(equations 5 to 7). So `SequenceMean` gives the paper's objective; `TokenMean` would weigh sequences by their length.

The bounds 3e-4 and 4e-4 are the paper's. They are small because s_i is a geometric mean, which moves some hundred times less than the
ratio of a token. Clip metrics count tokens. Difference from verl: log s_i is clipped at 20, not at 10.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from argosy.rl.policy.settings import LossName, Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.rl.policy.token_losses import TokenLoss


class GSPO(Policy):
    """Group sequence policy optimization (arXiv:2507.18071): the ratio of the whole completion is clipped, at the paper's 3e-4 and
    4e-4.
    """

    loss: LossName = "gspo"
    low: float = Field(3e-4, ge=0)
    high: float = Field(4e-4, ge=0)


def gspo(
    new: "Float[Array, 'B T']",
    old: "Float[Array, 'B T']",
    advantages: "Float[Array, 'B #T']",
    mask: "Float[Array, 'B T']",
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> "TokenLoss":
    """Computes the clipped loss of each token with the ratio of its sequence.

    Args:
        new: log-probabilities of the tokens under the trained policy.
        old: log-probabilities of the tokens under the policy at the start of the step.
        advantages: the advantage of each token [B T], or one per completion [B 1].

    Raises:
        BadInput: a bound clips every ratio or none.
    """
    import jax
    import jax.numpy as jnp

    from argosy.rl.policy.token_losses import (
        TokenLoss,
        clip_metrics,
        clipped_objective,
        log_ratios,
        ratio_metrics,
        ratios,
        sequence_mask,
        sequence_means,
    )

    logs = jax.lax.stop_gradient(sequence_means(log_ratios(new, old, mask), mask))
    ratio = ratios(logs) * jnp.exp(log_ratios(new, jax.lax.stop_gradient(new), mask))
    tokens = jnp.where(mask > 0, clipped_objective(ratio, advantages, low, high), 0.0)
    metrics = ratio_metrics(logs, sequence_mask(mask)) | clip_metrics(ratio, advantages, mask, low, high)
    return TokenLoss(tokens, metrics)
