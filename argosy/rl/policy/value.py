"""The clipped loss of PPO's critic: arXiv:1707.06347, in the form of its authors' code (arXiv:2005.12729).

    L_t = 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - epsilon, V_old + epsilon) - R_t)^2)

The maximum is pessimistic: a value that moved more than epsilon towards its return stops learning, and a value that moved away keeps
learning. epsilon is in units of the return; 0.2 suits returns of about 1. For larger rewards, scale epsilon with them or turn clipping
off. arXiv:2006.05990 found that clipping hurts at any threshold. The factor 1/2 is as in TRL and verl. Callers multiply the loss by
their own coefficient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.rl.policy.metrics import Metrics, mean_where
from argosy.rl.policy.token_losses import TokenLoss


def value_loss(
    values: Float[Array, "B T"],
    old: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    clip: float | None = 0.2,
) -> TokenLoss:
    """Computes half of the clipped squared error of each value.

    Args:
        values: the critic's values.
        old: the critic's values at the start of the step.
        returns: the returns that the critic learns.
        mask: 1 for tokens that the policy sampled.
        clip: how far a value may move from `old`, in units of the return. None: no clipping.

    Raises:
        BadInput: clip is not above 0.
    """
    if clip is not None and clip <= 0:
        raise BadInput(f"values clipped to a distance of {clip}", hint="give a distance above 0, such as 0.2, or none at all")
    live = mask > 0
    values, old, returns = (jnp.where(live, each, 0.0) for each in (values, old, returns))
    error = (values - returns) ** 2
    clipped = error if clip is None else (old + jnp.clip(values - old, -clip, clip) - returns) ** 2
    metrics: Metrics = {
        "value/error": mean_where(jax.lax.stop_gradient(error), mask),
        "value/mean": mean_where(jax.lax.stop_gradient(values), mask),
        "value/clipped": mean_where((clipped > error).astype(mask.dtype), mask),
    }
    return TokenLoss(0.5 * jnp.maximum(error, clipped), metrics)
