"""Contrastive preference optimization (CPO): Xu et al. 2024, arXiv:2401.08417, equations 3 to 5. No reference.

    -log s(beta (log p(w) - log p(l)))  -  sft log p(w) / |w|

w is the chosen answer, l the rejected one, |y| the number of tokens of an answer, and s the logistic function. The second term takes
the place of the reference.

Difference from the paper: the second term is divided by the number of tokens, as in the authors' code; the paper writes the sum.
Difference from TRL 1.16 (CPOTrainer): the second term counts only the tokens of the completion, and is the mean over each answer's
tokens, then over pairs. TRL counts the prompt's tokens too, and takes the mean over all tokens of a micro-batch.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.objectives.preferences.base import PairObjective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.train.objectives.loss import Loss, Models
    from argosy.train.objectives.preferences.sequences import SequenceLogps


class CPO(PairObjective):
    """Contrastive preference optimization (arXiv:2401.08417)."""

    beta: float = Field(0.1, gt=0)
    """Scale of the difference of log-probabilities; the paper uses 0.1."""
    sft: Annotated[float, Also("cpo_alpha")] = Field(1.0, ge=0)
    """Weight of the cross-entropy of the chosen completion, which replaces the reference; 1 in the paper."""

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import pair_loss

        return pair_loss(cpo, self, models, batch)


def cpo(settings: CPO, logps: "SequenceLogps", live: "Float[Array, 'B s']") -> "Loss":
    """Computes the loss of a batch from the log-probabilities of its sequences."""
    import jax

    from argosy.train.objectives.loss import Loss
    from argosy.train.objectives.preferences.sequences import pairs, preference_metrics

    both = pairs(logps, live)
    chosen, rejected = settings.beta * both.chosen.logps, settings.beta * both.rejected.logps
    preference, sft = -jax.nn.log_sigmoid(chosen - rejected), -both.chosen.means
    metrics = preference_metrics(both, chosen, rejected) | {"loss/preference": both.mean(preference), "loss/sft": both.mean(sft)}
    return Loss(both.mean(preference + settings.sft * sft), metrics)
