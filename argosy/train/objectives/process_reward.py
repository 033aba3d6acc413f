"""Process reward models: whether each step of an answer is right. Lightman et al. 2023, arXiv:2305.20050, section 2.6.

    -y log s(r) - (1 - y) log(1 - s(r))        at the last token of each step

r the score of the step's last token, y 1 for a right step and 0 for a wrong one, s the logistic function; the mean over all steps.

Differences from the paper: the label is right or wrong, without a neutral one, and is read by a head of one score instead of being
predicted as a token. From TRL's PRMTrainer: one score where it has two, whose difference is this one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models, WeightedMean
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import preferred, scores
from argosy.train.preferences import ProcessReward


def of_steps(found: Float[Array, "B T"], right: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Loss:
    """The loss from the scores of steps. mask: 1 at the last token of each."""
    ends = mask > 0
    each = -jax.nn.log_sigmoid(jnp.where(right > 0, found, -found))

    def mean(values: Array, where: Array) -> WeightedMean:
        return WeightedMean(jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32))

    # A head of zeros has no opinion.
    above = preferred(found, jnp.zeros_like(found), jnp.abs(found))
    metrics = {
        "accuracy": mean(jnp.where(right > 0, above, 1 - above), ends),
        "scores/right": mean(found, ends & (right > 0)),
        "scores/wrong": mean(found, ends & (right <= 0)),
    }
    return Loss(mean(each, ends), metrics)


def loss(how: ProcessReward, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective. Mask and labels are aligned with targets, one place before the token that they belong to."""
    each, aux = scores(models["model"], batch)
    at_targets = jnp.pad(each[:, 1:], ((0, 0), (0, 1)))
    made = of_steps(at_targets, batch["right"], batch["mask"])
    return with_routers(made, models["model"], aux, jnp.sum(batch["mask"] > 0, 1, dtype=jnp.float32))
