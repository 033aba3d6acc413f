"""Kahneman-Tversky optimization (KTO): Ethayarajh et al. 2024, arXiv:2402.01306, equation 8. Answers with a label, not pairs.

    r(x, y) = log p(y | x) - log p_ref(y | x)        z = max(0, mean over the batch of r(x, y'))
    good answers: lambda_D (1 - s(beta (r - z)))     bad answers: lambda_U (1 - s(beta (z - r)))

y' is the answer to another prompt of the data (section 4.1: mismatched outputs), and s is the logistic function. z estimates the
divergence of the model from the reference; no gradient flows through it.

A group of rows has two rows: an example, and its prompt with the answer to another prompt. That answer is chosen when the data are
read, so the reference's log-probabilities of both can be computed once. z is the mean over the whole batch of an update, however the
batch is split.

Differences from the paper: y' is the answer to the next prompt of the data, not of the micro-batch, and z is over the whole batch.
Differences from TRL 1.16 (KTOTrainer): TRL's z is over a micro-batch, so accumulation changes its loss, and TRL needs rows in the order
of the file. Neither holds here. A record whose neighbor has the same prompt gets the next answer to another prompt; TRL uses a matched
answer there as if it were mismatched.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from argosy.train.objectives.objective import Needs
from argosy.train.objectives.preferences.base import ReferenceObjective, sequence_fields

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean
    from argosy.train.objectives.preferences.sequences import SequenceLogps


class KTO(ReferenceObjective):
    """Kahneman-Tversky optimization, from completions that are labeled good or bad (arXiv:2402.01306)."""

    # A group is an example, and its prompt with the answer to another one. A batch of one example has no estimate worth the name.
    needs: ClassVar[Needs] = Needs(rows_per_group=2, formats=("kto",), least_groups=2)

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference, as in DPO; the paper uses 0.1."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of completions labeled good. The paper advises a ratio of desirable_weight x good to undesirable_weight x bad between 1
    and 4/3, counted in examples; 1 and 1 for balanced labels.
    """
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of completions labeled bad."""

    def reads(self) -> "Fields":
        return sequence_fields("desirable", *(("reference",) if self.reference == "cached" else ()))

    def batch_means(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "dict[str, WeightedMean]":
        """Computes the divergence of the model from the reference, which all examples of a batch share."""
        return divergence(self, models, batch)

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        """Computes the loss. A micro-batch must hold the `divergence` of the whole batch (`batch_means`)."""
        import jax.numpy as jnp

        from argosy.train.objectives.preferences.sequences import reference_logps, sequences
        from argosy.train.objectives.routers import with_routers

        z = batch["divergence"] if "divergence" in batch else divergence(self, models, batch)["divergence"].value()
        examples = _rows(batch, 0)
        logps, aux = sequences(self, models["model"], examples)
        loss = kto(self, logps, reference_logps(self, models, examples), z, examples["desirable"], examples["live"])
        return with_routers(loss, models["model"], aux, jnp.sum(examples["live"], 1))


def divergence(settings: KTO, models: "Models", batch: "dict[str, Array]") -> "dict[str, WeightedMean]":
    """Computes the mean log-ratio of mismatched answers, before the maximum with 0. It has no gradient."""
    import jax

    from argosy.train.objectives.preferences.sequences import reference_logps, sequences

    mismatched = _rows(batch, 1)
    logps, _ = sequences(settings, models["model"], mismatched)
    ratios = jax.lax.stop_gradient(logps.logps - reference_logps(settings, models, mismatched))
    return {"divergence": _mean(ratios, mismatched["live"])}


def kto(
    settings: KTO,
    logps: "SequenceLogps",
    reference: "Float[Array, 'P s']",
    divergence: "Float[Array, '']",
    desirable: "Float[Array, 'P s']",
    live: "Float[Array, 'P s']",
) -> "Loss":
    """Computes the loss of labeled answers.

    Args:
        logps: log-probabilities of the answers under the model.
        reference: log-probabilities of the answers under the reference.
        divergence: the mean log-ratio of mismatched answers.
        desirable: 1 for good answers, 0 for bad ones.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.preferences.sequences import preference_accuracy

    ratios, z = logps.logps - reference, jnp.maximum(divergence, 0.0)
    good, bad = live * desirable, live * (1 - desirable)
    gain = 1 - jax.nn.sigmoid(settings.beta * (ratios - z))
    pain = 1 - jax.nn.sigmoid(settings.beta * (z - ratios))
    each = jnp.where(desirable > 0, settings.desirable_weight * gain, settings.undesirable_weight * pain)
    rewards = settings.beta * ratios
    # Chance that an answer is on the side of z that its label says.
    above = preference_accuracy(ratios, jnp.broadcast_to(z, ratios.shape), jnp.abs(logps.logps) + jnp.abs(reference), logps.tie)
    right = jnp.where(desirable > 0, above, 1 - above)
    metrics = {
        "rewards/chosen": _mean(rewards, good),
        "rewards/rejected": _mean(rewards, bad),
        "rewards/accuracy": _mean(right, live),
        "logps/chosen": _mean(logps.logps, good),
        "logps/rejected": _mean(logps.logps, bad),
        "kl": WeightedMean(z * jnp.sum(live), jnp.sum(live)),
    }
    return Loss(_mean(each, live), metrics)


def _rows(batch: "dict[str, Array]", place: int) -> "dict[str, Array]":
    """Selects one row of every group: the example (0), or the prompt with the other answer (1)."""
    return {name: a[place::2] for name, a in batch.items() if a.ndim}


def _mean(values: "Float[Array, 'P s']", weights: "Float[Array, 'P s']") -> "WeightedMean":
    import jax.numpy as jnp

    from argosy.train.objectives.loss import WeightedMean

    return WeightedMean(jnp.sum(jnp.where(weights > 0, values * weights, 0.0)), jnp.sum(weights))
