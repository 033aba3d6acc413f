"""Kahneman-Tversky optimization (KTO): Ethayarajh et al. 2024, arXiv:2402.01306, equation 8. Answers with a label, not pairs.

    r(x, y) = log p(y | x) - log p_ref(y | x)        z = max(0, mean over the batch of r(x, y'))
    good answers: lambda_D (1 - s(beta (r - z)))     bad answers: lambda_U (1 - s(beta (z - r)))

y' is the answer to another prompt of the data (section 4.1: mismatched outputs), s the logistic function; no gradient flows through z,
which estimates the divergence of the model from the reference.

A group of rows is an example and its prompt with the other answer, which is chosen when the data is read: so the reference's
log-probabilities of both can be computed once. z is the mean over the whole batch of an update, however it is split.

Differences from the paper: y' is the answer to the next prompt of the data, not of the micro-batch, and z is over the whole batch.
From TRL 1.16 (KTOTrainer): its z is over a micro-batch, so accumulation changes its loss, and it needs rows in the order of the
file; neither holds here. A record whose neighbor has the same prompt gets the next answer to another prompt, where TRL takes a
matched answer for a mismatched one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models, WeightedMean
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import SequenceLogps, preferred, referenced, sequences
from argosy.train.preferences import KTO


def divergence(how: KTO, models: Models, batch: dict[str, Array]) -> dict[str, WeightedMean]:
    """The mean log-ratio of mismatched answers, before the maximum with 0. No gradient."""
    other = _rows(batch, 1)
    found, _ = sequences(how, models["model"], other)
    ratios = jax.lax.stop_gradient(found.logps - referenced(how, models, other))
    return {"divergence": _mean(ratios, other["live"])}


def kto(
    how: KTO,
    found: SequenceLogps,
    reference: Float[Array, "P s"],
    divergence: Float[Array, ""],
    desirable: Float[Array, "P s"],
    live: Float[Array, "P s"],
) -> Loss:
    """The loss of labeled answers.

    Args:
        divergence: the mean log-ratio of mismatched answers.
        desirable: 1 for good answers, 0 for bad ones.
    """
    ratios, z = found.logps - reference, jnp.maximum(divergence, 0.0)
    good, bad = live * desirable, live * (1 - desirable)
    gain = 1 - jax.nn.sigmoid(how.beta * (ratios - z))
    pain = 1 - jax.nn.sigmoid(how.beta * (z - ratios))
    each = jnp.where(desirable > 0, how.desirable_weight * gain, how.undesirable_weight * pain)
    rewards = how.beta * ratios
    # Chance that an answer is on the side of z that its label says.
    above = preferred(ratios, jnp.broadcast_to(z, ratios.shape), jnp.abs(found.logps) + jnp.abs(reference))
    right = jnp.where(desirable > 0, above, 1 - above)
    metrics = {
        "rewards/chosen": _mean(rewards, good),
        "rewards/rejected": _mean(rewards, bad),
        "rewards/accuracy": _mean(right, live),
        "logps/chosen": _mean(found.logps, good),
        "logps/rejected": _mean(found.logps, bad),
        "kl": WeightedMean(z * jnp.sum(live), jnp.sum(live)),
    }
    return Loss(_mean(each, live), metrics)


def loss(how: KTO, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective. A batch that is part of a larger one brings the larger one's `divergence`."""
    z = batch["divergence"] if "divergence" in batch else divergence(how, models, batch)["divergence"].value()
    own = _rows(batch, 0)
    found, aux = sequences(how, models["model"], own)
    made = kto(how, found, referenced(how, models, own), z, own["desirable"], own["live"])
    return with_routers(made, models["model"], aux, jnp.sum(own["live"], 1))


def _rows(batch: dict[str, Array], place: int) -> dict[str, Array]:
    """The rows at one place of every group."""
    return {name: a[place::2] for name, a in batch.items() if a.ndim}


def _mean(values: Float[Array, "P s"], weights: Float[Array, "P s"]) -> WeightedMean:
    return WeightedMean(jnp.sum(jnp.where(weights > 0, values * weights, 0.0)), jnp.sum(weights))
