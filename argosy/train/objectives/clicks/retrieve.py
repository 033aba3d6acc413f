"""Retrieval with the items of a batch as negatives: each user's item among all items of the batch.

    -log exp(s(u, i)) / sum_j exp(s(u, j) - log n_j)        over clicks (u, i), j over the items of the batch

n_j is the number of times that item j is in the batch. It makes an item that is there twice count once. No user's own item is a
negative. The correction is that of Yi et al. 2019 (Sampling-bias-corrected neural modeling). Items are drawn uniformly here, so no
other bias is corrected.

`recall@k` is the share of clicks whose item is among the k best of the batch's rows. If the data contain the true factors of users and
items, `best_recall@k` is the recall of their products.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from argosy.core.settings import Settings
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models

RECALLS = (1, 10, 50)


class Retrieve(Settings, Objective):
    """Retrieval with the items of a batch as negatives."""

    needs: ClassVar[Needs] = Needs(inputs="clicks", least_groups=2, whole_batch=True)

    def reads(self) -> "Fields":
        from argosy.data.sources.clicks import CLICK_FIELDS

        return {name: CLICK_FIELDS[name] for name in ("numbers", "categories", "label", "p", "q")}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax
        import jax.numpy as jnp

        from argosy.train.objectives.clicks.rank import auc
        from argosy.train.objectives.loss import Loss, WeightedMean

        model, items, weight = models["model"], batch["categories"][:, 1], batch["label"]
        users = model.users(batch["numbers"], batch["categories"][:, 0])
        scores = (users @ model.items(items).T).astype(jnp.float32) / model.config.temperature
        same = items[:, None] == items[None]
        corrected = scores - jnp.log(jnp.sum(same, 0, dtype=jnp.float32))
        positives = jnp.diagonal(scores)
        each = jax.nn.logsumexp(corrected, -1) - positives
        clicks = jnp.sum(weight)
        metrics = {}
        for prefix, by in (("", scores), ("best_", batch["p"] @ batch["q"].T)):
            rank = jnp.sum((by > jnp.diagonal(by)[:, None]) & ~same, -1)
            metrics |= {f"{prefix}recall@{k}": WeightedMean(jnp.sum(jnp.where(rank < k, weight, 0.0)), clicks) for k in RECALLS}
        return Loss(WeightedMean(jnp.sum(weight * each), clicks), metrics | {"auc": auc(positives, weight)})
