"""Contrastive preference optimization (CPO): Xu et al. 2024, arXiv:2401.08417, equations 3 to 5. No reference.

    -log s(beta (log p(w) - log p(l)))  -  sft log p(w) / |w|

w the chosen, l the rejected answer, |y| its number of tokens, s the logistic function. The second term stands for the reference,
which the paper shows to be bounded by it.

Differences from the paper: the second term is divided by the number of tokens, as in the authors' code; the paper writes the sum.
From TRL 1.16 (CPOTrainer): that term counts the completion alone and is the mean over each answer's tokens, then over pairs; TRL
counts the prompt's tokens too, and takes the mean over all tokens of a micro-batch.
"""

import jax
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import SequenceLogps, pair_weights, pairs, preference_metrics, sequences
from argosy.train.preferences import CPO


def cpo(how: CPO, found: SequenceLogps, live: Float[Array, "B s"]) -> Loss:
    """The loss of a batch from the log-probabilities of its sequences."""
    both = pairs(found, live)
    chosen, rejected = how.beta * both.chosen.logps, how.beta * both.rejected.logps
    preference, sft = -jax.nn.log_sigmoid(chosen - rejected), -both.chosen.means
    metrics = preference_metrics(both, chosen, rejected) | {"loss/preference": both.mean(preference), "loss/sft": both.mean(sft)}
    return Loss(both.mean(preference + how.sft * sft), metrics)


def loss(how: CPO, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    found, aux = sequences(how, models["model"], batch)
    return with_routers(cpo(how, found, batch["live"]), models["model"], aux, pair_weights(batch["live"]))
