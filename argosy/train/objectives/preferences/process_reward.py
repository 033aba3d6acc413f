"""Process reward models: whether each step of an answer is right. Lightman et al. 2023, arXiv:2305.20050, section 2.6.

    -y log s(r) - (1 - y) log(1 - s(r))        at the last token of each step

r is the score of the step's last token, y is 1 for a right step and 0 for a wrong one, and s is the logistic function. The loss is the
mean over all steps.

Differences from the paper: a label is right or wrong, never neutral, and a head of one score predicts it instead of a token. Difference
from TRL's PRMTrainer: there is one score instead of two; it corresponds to the difference of TRL's two scores.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from argosy.core.settings import Settings
from argosy.train.objectives.objective import Needs, Objective
from argosy.train.objectives.preferences.base import sequence_fields

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean


class ProcessReward(Settings, Objective):
    """A process reward model: whether each step of an answer is right (arXiv:2305.20050)."""

    needs: ClassVar[Needs] = Needs(formats=("stepwise",), scores=1)

    def reads(self) -> "Fields":
        from argosy.train.objectives.preferences.sequences import PER_TOKEN

        return {**sequence_fields(), "right": PER_TOKEN}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        """Computes the loss. Mask and labels are aligned with targets, so they stand one position before the token that they belong
        to."""
        import jax.numpy as jnp

        from argosy.train.objectives.preferences.sequences import scores
        from argosy.train.objectives.routers import with_routers

        of_tokens, aux = scores(models["model"], batch)
        at_targets = jnp.pad(of_tokens[:, 1:], ((0, 0), (0, 1)))
        loss = step_loss(at_targets, batch["right"], batch["mask"])
        return with_routers(loss, models["model"], aux, jnp.sum(batch["mask"] > 0, 1, dtype=jnp.float32))


def step_loss(scores: "Float[Array, 'B T']", right: "Float[Array, 'B T']", mask: "Float[Array, 'B T']") -> "Loss":
    """Computes the loss from the scores of steps.

    Args:
        mask: 1 at the last token of each step.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.preferences.sequences import preference_accuracy

    def mean(values: "Array", where: "Array") -> "WeightedMean":
        return WeightedMean(jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32))

    ends = mask > 0
    each = -jax.nn.log_sigmoid(jnp.where(right > 0, scores, -scores))
    # The probability that a step is right is 1/2 + r / 4 near 0. One that differs from 1/2 by no more than rounding is no opinion,
    # whatever the sign of r: it counts as half right. So does that of a head of zeros.
    above = preference_accuracy(scores, jnp.zeros_like(scores), jnp.ones_like(scores))
    metrics = {
        "accuracy": mean(jnp.where(right > 0, above, 1 - above), ends),
        "scores/right": mean(scores, ends & (right > 0)),
        "scores/wrong": mean(scores, ends & (right <= 0)),
    }
    return Loss(mean(each, ends), metrics)
