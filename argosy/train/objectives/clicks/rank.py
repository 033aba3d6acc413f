"""Ranking by the probability of a click: the log loss of each row.

    -y log s(z) - (1 - y) log(1 - s(z))

z is the score of a user and an item, and y is 1 for a click. If the data contain the true probability of each click, the log loss and
the AUC of these probabilities are also reported. No model can beat them but by chance.

AUC is the share of pairs of a click and a non-click in which the click has the larger score. Only pairs within a batch are counted, so
the mean over batches is not the AUC over all pairs of the data.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from argosy.core.settings import Settings
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean


class Rank(Settings, Objective):
    """Ranking by the probability of a click."""

    needs: ClassVar[Needs] = Needs(inputs="clicks")

    def reads(self) -> "Fields":
        from argosy.data.sources.clicks import CLICK_FIELDS

        return {name: CLICK_FIELDS[name] for name in ("numbers", "categories", "label", "probability")}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.loss import Loss

        scores = models["model"](batch["numbers"], batch["categories"])
        return Loss(log_loss(scores, batch["label"]), ranking_metrics(scores, batch))


def log_loss(scores: "Float[Array, 'B']", label: "Float[Array, 'B']") -> "WeightedMean":
    """Computes the mean log loss of scores, which are logits."""
    import jax.numpy as jnp

    from argosy.train.objectives.loss import WeightedMean

    each = jnp.maximum(scores, 0) - scores * label + jnp.log1p(jnp.exp(-jnp.abs(scores)))
    return WeightedMean(jnp.sum(each), jnp.asarray(each.size, jnp.float32))


def ranking_metrics(scores: "Float[Array, 'B']", batch: "dict[str, Array]") -> "dict[str, WeightedMean]":
    """Computes the AUC of scores, and the AUC and the log loss of the true probabilities of clicks."""
    import jax.numpy as jnp

    probability = jnp.clip(batch["probability"], 1e-7, 1 - 1e-7)
    logit = jnp.log(probability) - jnp.log1p(-probability)
    label = batch["label"]
    return {"auc": auc(scores, label), "best_auc": auc(logit, label), "best_loss": log_loss(logit, label)}


def auc(scores: "Float[Array, 'B']", label: "Float[Array, 'B']") -> "WeightedMean":
    """Computes the share of pairs of a click and a non-click in which the click has the larger score. Equal scores count half.

    Args:
        label: 1 for a click, 0 for a non-click.
    """
    import jax.numpy as jnp

    from argosy.train.objectives.loss import WeightedMean

    apart = scores[:, None] - scores[None]
    pairs = label[:, None] * (1 - label[None])
    return WeightedMean(jnp.sum(pairs * (jnp.sign(apart) + 1) / 2), jnp.sum(pairs))
