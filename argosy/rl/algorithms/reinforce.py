"""REINFORCE: Williams 1992; also the loss of GPG (arXiv:2504.02546), ReMax (arXiv:2310.10505) and OPO (arXiv:2505.23585).

    L_t = -A_t log p_new(y_t)

Right only for samples of the policy that is trained: one update per batch of samples. For more, take `cispo`, which is this with an
importance weight, or multiply by `argosy.rl.policy.correction`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.rl.policy.token_losses import TokenLoss


def reinforce(new: Float[Array, "B T"], advantages: Float[Array, "B #T"], mask: Float[Array, "B T"]) -> TokenLoss:
    """The loss of each token. Its value is not that of an objective; its gradient is meant.

    Args:
        new: log-probabilities of the tokens by the trained policy.
        advantages: of tokens, or of rows [B 1].
    """
    return TokenLoss(jnp.where(mask > 0, -advantages * jnp.where(mask > 0, new, 0.0), 0.0), {})
