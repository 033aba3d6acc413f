"""Odds ratio preference optimization (ORPO): Hong et al. 2024, arXiv:2403.07691, equations 6 and 7. No reference.

    -log p(w)/|w|  -  beta log s(log odds(w) - log odds(l))        odds(y) = P(y) / (1 - P(y)),  P(y) = exp(log p(y) / |y|)

w is the chosen answer, l the rejected one, |y| the number of tokens of an answer, and s the logistic function. The first term is
fine-tuning on the chosen answers, so ORPO starts from a base model.

Differences from the paper: none. Difference from TRL 1.16 (ORPOTrainer): the first term counts only the tokens of the completion, as in
the paper, and is the mean over each answer's tokens, then over pairs. TRL counts the prompt's tokens too, and takes the mean over all
tokens of a micro-batch.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.objectives.preferences.base import PairObjective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.train.objectives.loss import Loss, Models
    from argosy.train.objectives.preferences.sequences import SequenceLogps

# A mean log-probability nearer to 0 than this counts as this: the odds of a certain answer are infinite.
CERTAIN = -1e-6


class ORPO(PairObjective):
    """Odds ratio preference optimization: fine-tuning and preferences in one (arXiv:2403.07691)."""

    beta: Annotated[float, Also("orpo_alpha")] = Field(0.1, gt=0)
    """Weight of the odds-ratio term beside the cross-entropy, lambda in the paper, which uses 0.1 for Mistral and 0.2 for Llama 2."""

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import pair_loss

        return pair_loss(orpo, self, models, batch)


def log_odds(logp: "Float[Array, 'P s']") -> "Float[Array, 'P s']":
    """Computes log(P / (1 - P)) from log P. It uses expm1 where log P is near 0, because 1 - exp loses every digit there, and log1p
    elsewhere, where expm1 is near -1."""
    import jax.numpy as jnp

    logp = jnp.minimum(logp, CERTAIN)
    near = logp > -0.6931
    rest = jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, logp, -0.5))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, logp))))
    return logp - rest


def orpo(settings: ORPO, logps: "SequenceLogps", live: "Float[Array, 'B s']") -> "Loss":
    """Computes the loss of a batch from the log-probabilities of its sequences."""
    import jax

    from argosy.train.objectives.loss import Loss
    from argosy.train.objectives.preferences.sequences import pairs, preference_metrics

    both = pairs(logps, live)
    chosen, rejected = both.chosen.means, both.rejected.means
    ratio = log_odds(chosen) - log_odds(rejected)
    odds = -jax.nn.log_sigmoid(ratio)
    metrics = preference_metrics(both, settings.beta * chosen, settings.beta * rejected)
    metrics |= {"log_odds_ratio": both.mean(ratio), "loss/sft": both.mean(-chosen), "loss/odds_ratio": both.mean(odds)}
    return Loss(both.mean(-chosen + settings.beta * odds), metrics)
