"""Simple preference optimization (SimPO): Meng et al. 2024, arXiv:2405.14734, equation 6. No reference.

    -log s(beta/|w| log p(w) - beta/|l| log p(l) - gamma)

w the chosen, l the rejected answer, |y| its number of tokens, s the logistic function.

Differences from the paper: none. From TRL 1.16 (CPOTrainer, loss_type="simpo"): none in the loss with cpo_alpha=0; its gamma is
this one.
"""

import jax
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import SequenceLogps, pair_weights, pairs, preference_metrics, sequences
from argosy.train.preferences import SimPO


def simpo(how: SimPO, found: SequenceLogps, live: Float[Array, "B s"]) -> Loss:
    """The loss of a batch from the log-probabilities of its sequences."""
    both = pairs(found, live)
    chosen, rejected = how.beta * both.chosen.means, how.beta * both.rejected.means
    loss = both.mean(-jax.nn.log_sigmoid(chosen - rejected - how.gamma))
    return Loss(loss, preference_metrics(both, chosen, rejected))


def loss(how: SimPO, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    found, aux = sequences(how, models["model"], batch)
    return with_routers(simpo(how, found, batch["live"]), models["model"], aux, pair_weights(batch["live"]))
