"""The KL penalty for leaving the reference: KL(policy, reference), estimated at each sampled token. The estimators are from Schulman
2020, joschu.net/blog/kl-approx.html; arXiv:2510.01555 treats their gradients.

    d = log p_new - log p_ref        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d
    k3+: the value of k3 with the gradient of k2

The expected value of k1 and k3 is the divergence; k3 is never negative and has less variance. In the LOSS the estimate is
differentiated after sampling, so its expected gradient matters. The expected gradient is:

    k1      0: the penalty does nothing on-policy (Tunix's default)
    k2      the gradient of KL(policy, reference), which is the right one
    k3      the gradient of KL(reference, policy), which is bounded however unlikely the reference finds a token (TRL, GRPO's paper)
    k3+     the gradient of KL(policy, reference), as k2 has it (the name is verl's); the default here

In the REWARD the estimate is a number, and only k1 gives the right gradient, so it is the default there (PPO, RLOO, REINFORCE++).

With samples of an older policy, every estimate needs the ratio p_new / p_old as a weight (DeepSeek-V3.2, arXiv:2512.02556; in TRL
`use_bias_correction_kl`, which is off by default). Pass `old` for that. The ratio has no gradient here.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.policy.metrics import Metrics, mean_where
from argosy.rl.policy.token_losses import LARGEST_LOG_RATIO, TokenLoss, log_ratios, ratios

Value = Literal["k1", "k2", "k3"]
Estimator = Literal["k1", "k2", "k3", "k3+"]


def estimate(
    new: Float[Array, "B T"], reference: Float[Array, "B T"], mask: Float[Array, "B T"], estimator: Estimator = "k3+"
) -> Float[Array, "B T"]:
    """Estimates the divergence at each token, in nats; 0 outside the mask.

    Args:
        new, reference: log-probabilities of the tokens under the trained policy and under the reference.
    """
    d = log_ratios(new, reference, mask)
    if estimator == "k1":
        return d
    k2 = 0.5 * d**2
    if estimator == "k2":
        return k2
    k3 = jnp.expm1(jnp.minimum(-d, LARGEST_LOG_RATIO)) + d
    return k3 if estimator == "k3" else k2 + jax.lax.stop_gradient(k3 - k2)


def kl_loss(
    new: Float[Array, "B T"],
    reference: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    coefficient: float,
    estimator: Estimator = "k3+",
    old: Float[Array, "B T"] | None = None,
) -> TokenLoss:
    """Computes the penalty as a loss of each token. The metric `kl` is the divergence by k3, whatever the estimator.

    Args:
        new, reference: log-probabilities of the tokens under the trained policy and under the reference.
        mask: 1 for tokens that the policy sampled.
        coefficient: the factor of the divergence.
        old: log-probabilities of the tokens under the policy that sampled them, if that is not the trained policy.
    """
    weight = 1.0 if old is None else jax.lax.stop_gradient(ratios(log_ratios(new, old, mask)))
    divergence = jax.lax.stop_gradient(weight * estimate(new, reference, mask, "k3"))
    return TokenLoss(
        coefficient * weight * estimate(new, reference, mask, estimator), {"kl": mean_where(divergence, mask)}
    )


def in_reward(
    rewards: Float[Array, "B T"],
    old: Float[Array, "B T"],
    reference: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    coefficient: float,
    estimator: Value = "k1",
) -> tuple[Float[Array, "B T"], Metrics]:
    """Subtracts the penalty from the rewards of tokens. The result has no gradient.

    Args:
        old: log-probabilities of the tokens under the policy that sampled them.
        reference: log-probabilities of the tokens under the reference.
        coefficient: the factor of the divergence.
    """
    old = jax.lax.stop_gradient(old)
    metrics: Metrics = {"kl": mean_where(estimate(old, reference, mask, "k3"), mask)}
    return rewards - coefficient * estimate(old, reference, mask, estimator), metrics
