"""REINFORCE: Williams 1992; also the loss of GPG (arXiv:2504.02546), ReMax (arXiv:2310.10505) and OPO (arXiv:2505.23585).

    L_t = -A_t log p_new(y_t)

The loss is right only for samples of the current policy, so it allows one update per batch of samples. For several updates, use
`cispo`, which adds an importance weight, or multiply by `argosy.rl.policy.correction`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.policy.token_losses import TokenLoss


def reinforce(new: Float[Array, "B T"], advantages: Float[Array, "B #T"], mask: Float[Array, "B T"]) -> TokenLoss:
    """Computes the loss of each token. Only its gradient is meaningful.

    Args:
        new: log-probabilities of the tokens under the trained policy.
        advantages: the advantage of each token [B T], or one per completion [B 1].
    """
    return TokenLoss(jnp.where(mask > 0, -advantages * jnp.where(mask > 0, new, 0.0), 0.0), {})
