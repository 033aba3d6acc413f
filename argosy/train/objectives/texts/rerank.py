"""Cross-encoders that rank documents for a query: one score for the pair of both texts.

    pairwise     -log s(z(q, d+) - z(q, d-))
    pointwise    -(log s(z(q, d+)) + log(1 - s(z(q, d-)))) / 2

z is the score of a query q with a document, d+ is a document that answers the query, d- one that does not, and s is the logistic
function. The pairwise loss is RankNet (Burges et al. 2005). The pointwise loss is the binary cross-entropy of Nogueira and Cho 2019
(arXiv:1901.04085), which is sentence-transformers' default.

Differences from the papers: none.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from argosy.core.settings import Settings
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models


class Rerank(Settings, Objective):
    """Cross-encoders, by documents that answer a query and documents that do not. Their head gives one score."""

    needs: ClassVar[Needs] = Needs(rows_per_group=2, formats=("rerank",), scores=1, encoders=True)

    loss: Literal["pairwise", "pointwise"] = "pairwise"
    """pairwise: the score of the right document is to be above the other's; pointwise: both are to be probabilities of an answer."""

    def reads(self) -> "Fields":
        from argosy.train.objectives.texts.batch import TEXTS

        return TEXTS

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import pair_weights
        from argosy.train.objectives.routers import with_routers
        from argosy.train.objectives.texts.batch import batch_scores

        scores, aux = batch_scores(models["model"], batch)
        loss = reranking_loss(self, scores[::2, :, 0], scores[1::2, :, 0], batch["live"][::2])
        return with_routers(loss, models["model"], aux, pair_weights(batch["live"]))


def reranking_loss(settings: Rerank, right: "Float[Array, 'P s']", wrong: "Float[Array, 'P s']", live: "Float[Array, 'P s']") -> "Loss":
    """Computes the loss of a batch.

    Args:
        right, wrong: the scores of the documents that answer the query, and of those that do not.
        live: 1 where there is a pair of documents.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.preferences.sequences import preference_accuracy

    def mean(values: "Array") -> WeightedMean:
        return WeightedMean(jnp.sum(jnp.where(live > 0, values, 0.0)), jnp.sum(live))

    if settings.loss == "pairwise":
        each = -jax.nn.log_sigmoid(right - wrong)
    else:
        each = -(jax.nn.log_sigmoid(right) + jax.nn.log_sigmoid(-wrong)) / 2
    metrics = {
        "accuracy": mean(preference_accuracy(right, wrong, jnp.abs(right) + jnp.abs(wrong))),
        "scores/positive": mean(right),
        "scores/negative": mean(wrong),
    }
    return Loss(mean(each), metrics)
