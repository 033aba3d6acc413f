"""Reward models: the likelihood of preferences by Bradley and Terry (1952), as in Ouyang et al. 2022, arXiv:2203.02155, equation 1.

    -log s(r(w) - r(l) - m)  +  center (r(w) + r(l))^2

r is the score at the last token of a sequence, w the chosen answer, l the rejected one, and s the logistic function. m is the margin by
which the chosen answer is better (Touvron et al. 2023, arXiv:2307.09288, equation 2); it is 0 where the data have none. The second term
keeps scores near 0 (Eisenstein et al. 2023, arXiv:2312.09244), since the first fixes only their difference.

Differences from the papers: none. The first paper has no second term, and shifts scores afterwards. Difference from TRL 1.16
(RewardTrainer): the default of `center` is 0.01, which TRL recommends but leaves off.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from argosy.core.settings import Also, Settings
from argosy.train.objectives.objective import Needs, Objective
from argosy.train.objectives.preferences.base import sequence_fields

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models


class RewardModel(Settings, Objective):
    """A reward model by the Bradley-Terry likelihood of preferences. Its head gives one score."""

    needs: ClassVar[Needs] = Needs(rows_per_group=2, formats=("preference",), scores=1)

    center: Annotated[float, Also("center_rewards_coefficient")] = Field(0.01, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near 0: preferences fix only their difference.
    arXiv:2312.09244 uses 0.01. 0: off."""

    def reads(self) -> "Fields":
        return sequence_fields("margin")

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import last, pair_weights, scores, tie_of
        from argosy.train.objectives.routers import with_routers

        of_tokens, aux = scores(models["model"], batch)
        of_sequences = last(of_tokens, batch["segments"], batch["live"].shape[1])
        loss = bradley_terry(self, of_sequences, batch["margin"], batch["live"], tie_of(models["model"].dtype))
        return with_routers(loss, models["model"], aux, pair_weights(batch["live"]))


def bradley_terry(
    settings: RewardModel,
    scores: "Float[Array, 'B s']",
    margin: "Float[Array, 'B s']",
    live: "Float[Array, 'B s']",
    tie: float = 1e-5,
) -> "Loss":
    """Computes the loss of a batch from the scores of its sequences.

    Args:
        margin: the margin of each pair, in both of its rows.
        live: 1 where a slot holds a sequence.
        tie: the relative rounding error of scores.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss
    from argosy.train.objectives.preferences.sequences import Pairs, SequenceLogps, preference_accuracy

    chosen, rejected = scores[::2], scores[1::2]
    both = Pairs(SequenceLogps(chosen, chosen), SequenceLogps(rejected, rejected), live[::2])
    each = -jax.nn.log_sigmoid(chosen - rejected - margin[::2]) + settings.center * (chosen + rejected) ** 2
    metrics = {
        "rewards/chosen": both.mean(chosen),
        "rewards/rejected": both.mean(rejected),
        "rewards/accuracy": both.mean(preference_accuracy(chosen, rejected, jnp.abs(chosen) + jnp.abs(rejected), tie)),
        "rewards/margin": both.mean(chosen - rejected),
    }
    return Loss(both.mean(each), metrics)
