"""The entropy bonus: arXiv:1602.01783, section 4. It keeps the policy from converging before it has explored other completions.

    H_t = -sum over the vocabulary of p log p        L_t = -coefficient H_t

The bonus is a loss of each token, so it is normalized as the policy's loss is. TRL takes its mean over tokens, whatever the policy's
normalization is.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.policy.metrics import mean_where
from argosy.rl.policy.token_losses import TokenLoss


def entropy_of(logits: Float[Array, "*n V"]) -> Float[Array, "*n"]:
    """Computes the entropy of each distribution, in nats. A logit of minus infinity stands for probability 0."""
    logs = jax.nn.log_softmax(logits)
    # 0 log 0 is 0; the inner where keeps the gradient from being infinite times 0.
    finite = jnp.isfinite(logs)
    return -jnp.sum(jnp.exp(logs) * jnp.where(finite, logs, 0.0), -1)


def entropy_bonus(entropies: Float[Array, "B T"], mask: Float[Array, "B T"], coefficient: float) -> TokenLoss:
    """Computes the bonus as a loss of each token.

    Args:
        entropies: the entropy of the trained policy's distribution at each token, in nats.
        mask: 1 for tokens that the policy sampled.
        coefficient: the factor of the entropy.
    """
    clean = jnp.where(mask > 0, entropies, 0.0)
    return TokenLoss(-coefficient * clean, {"entropy": mean_where(jax.lax.stop_gradient(clean), mask)})
