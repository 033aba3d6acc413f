"""Simple preference optimization (SimPO): Meng et al. 2024, arXiv:2405.14734, equation 6. No reference.

    -log s(beta/|w| log p(w) - beta/|l| log p(l) - gamma)

w is the chosen answer, l the rejected one, |y| the number of tokens of an answer, and s the logistic function.

Differences from the paper: none. Differences from TRL 1.16 (CPOTrainer, loss_type="simpo") with cpo_alpha=0: none; gamma is the same.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.objectives.preferences.base import PairObjective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.train.objectives.loss import Loss, Models
    from argosy.train.objectives.preferences.sequences import SequenceLogps


class SimPO(PairObjective):
    """Simple preference optimization without a reference (arXiv:2405.14734)."""

    beta: float = Field(2.0, gt=0)
    """Scale of the reward, which is the mean log-probability of a completion's tokens; the paper uses 2 to 2.5, and 10 for some models.
    """
    gamma: Annotated[float, Also("simpo_gamma", "gamma_beta_ratio", note="gamma is the paper's: the ratio times beta")] = Field(
        1.0, ge=0
    )
    """Target reward margin between chosen and rejected; the paper finds gamma / beta of 0.3 to 0.5 best in most settings."""

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import pair_loss

        return pair_loss(simpo, self, models, batch)


def simpo(settings: SimPO, logps: "SequenceLogps", live: "Float[Array, 'B s']") -> "Loss":
    """Computes the loss of a batch from the log-probabilities of its sequences."""
    import jax

    from argosy.train.objectives.loss import Loss
    from argosy.train.objectives.preferences.sequences import pairs, preference_metrics

    both = pairs(logps, live)
    chosen, rejected = settings.beta * both.chosen.means, settings.beta * both.rejected.means
    loss = both.mean(-jax.nn.log_sigmoid(chosen - rejected - settings.gamma))
    return Loss(loss, preference_metrics(both, chosen, rejected))
