"""Sentence encoders: the vector of a text learns to be nearer to the vector of its positive than to those of all other texts of the
batch.

    -log exp(s cos(a_i, p_i)) / sum_j exp(s cos(a_i, d_j))        d_j the positives and all negatives of the batch

a_i is the vector of an anchor, p_i that of its positive, and s the scale. This is InfoNCE (van den Oord et al. 2018, arXiv:1807.03748)
with the other examples of the batch as negatives (Henderson et al. 2017, arXiv:1705.00652), and sentence-transformers'
MultipleNegativesRankingLoss.

`symmetric` also finds the anchor of each positive, as in CLIP (arXiv:2103.00020), and takes the mean of both losses. `dimensions`
trains the first entries of vectors to serve as shorter vectors (Kusupati et al. 2022, arXiv:2205.13147), by the mean of the losses at
these widths.

Differences from sentence-transformers: a text that equals an example's positive is no negative of that example, since it would be a
false negative; there a sampler avoids such batches. Its MatryoshkaLoss sums over widths.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.settings import Also, Settings
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, UInt32

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models

Pooling = Literal["mean", "cls", "max", "last"]


class Contrastive(Settings, Objective):
    """Sentence encoders, by pairs of texts that belong together, with the other texts of a batch as negatives."""

    needs: ClassVar[Needs] = Needs(
        rows_per_group=2, formats=("pair", "triplet", "negatives"), least_groups=2, encoders=True, whole_batch=True
    )

    negatives: int = Field(0, ge=0)
    """Negatives that each record has: 0 for records of `anchor` and `positive`, 1 for those with `negative`, any number for those with
    a list `negatives`. Where a record has fewer, the others of the batch remain."""
    scale: float = Field(20.0, gt=0)
    """What cosines are multiplied with: the inverse of the temperature."""
    symmetric: bool = False
    """Whether the anchor of each positive is to be found too."""
    dimensions: Annotated[list[Annotated[int, Field(ge=1)]], Also("matryoshka_dims")] = Field(default_factory=list)
    """Widths at which the first numbers of vectors serve alone. Empty: the whole vector."""
    pooling: Annotated[Pooling | None, Also("pooling_mode")] = None
    """How the vectors of tokens become one. None: as the folder of the model says; without one,
    mean for encoders and last for language models."""
    include_prompt: bool = True
    """Whether the vectors of a prompt's tokens (`data.prompts`) are pooled too."""

    @property
    def rows_per_group(self) -> int:
        return 2 + self.negatives

    @property
    def formats(self) -> tuple[str, ...]:
        if not self.negatives:
            return ("pair",)
        return ("triplet", "negatives") if self.negatives == 1 else ("negatives",)

    @property
    def text_pooling(self) -> str:
        return self.pooling or "mean"

    @property
    def config_entries(self) -> dict[str, Any]:
        # By this name vLLM and `/v1/embeddings` know which `dimensions` a request may ask for.
        return {"matryoshka_dimensions": sorted(self.dimensions)} if self.dimensions else {}

    def reads(self) -> "Fields":
        from argosy.train.objectives.texts.batch import vector_fields

        return vector_fields(self.include_prompt)

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax.numpy as jnp

        from argosy.train.objectives.routers import with_routers
        from argosy.train.objectives.texts.batch import batch_vectors, text_hashes

        vectors, aux = batch_vectors(models["model"], batch, self.text_pooling)
        hashes, live = text_hashes(batch), batch["live"] > 0
        group = self.rows_per_group
        # [n ...] of each place in a group: a row's slots after one another.
        apart = [[a[place::group].reshape(-1, *a.shape[2:]) for a in (vectors, hashes, live)] for place in range(group)]
        anchors, anchor_keys, of_anchors = apart[0]
        documents, keys, valid = (jnp.concatenate(each) for each in zip(*apart[1:], strict=True))
        loss = contrastive_loss(self, anchors, anchor_keys, of_anchors, documents, keys, valid)
        return with_routers(loss, models["model"], aux, jnp.sum(batch["live"], 1))


def contrastive_loss(
    settings: Contrastive,
    anchors: "Float[Array, 'N D']",
    anchor_keys: "UInt32[Array, 'N']",
    live: "Bool[Array, 'N']",
    documents: "Float[Array, 'R D']",
    keys: "UInt32[Array, 'R']",
    valid: "Bool[Array, 'R']",
) -> "Loss":
    """Computes the loss of a batch. Document i is the positive of anchor i.

    Args:
        anchors, documents: the vectors of the texts.
        anchor_keys, keys: a hash of the text of each anchor and of each document.
        live, valid: whether there is an anchor, and whether there is a document.
    """
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.texts.batch import unit_rows

    def cosines_of(width: int) -> "Array":
        return jnp.matmul(unit_rows(anchors[:, :width]), unit_rows(documents[:, :width]).T, precision="highest")

    def mean(values: "Array") -> WeightedMean:
        return WeightedMean(jnp.sum(jnp.where(live, values, 0.0)), jnp.sum(live.astype(jnp.float32)))

    n, positive = len(anchors), jnp.eye(len(anchors), len(documents), dtype=bool)
    same = (keys[:n, None] == keys[None]) & ~positive
    allowed = valid[None] & ~same
    widths = settings.dimensions or [anchors.shape[-1]]
    losses = []
    for width in widths:
        cosines = cosines_of(width)
        each = _negative_logp(settings.scale * cosines, positive, allowed)
        if settings.symmetric:
            twins = (anchor_keys[:, None] == anchor_keys[None]) & ~positive[:, :n]
            back = _negative_logp(settings.scale * cosines[:, :n].T, positive[:, :n], live[None] & ~twins)
            each = (each + back) / 2
        losses.append(each)
    cosines = cosines_of(anchors.shape[-1])
    right = jnp.sum(jnp.where(positive, cosines, 0.0), 1)
    rank = jnp.sum((cosines > right[:, None]) & allowed & ~positive, 1)
    negatives = jnp.sum((allowed & ~positive).astype(jnp.float32), 1)
    metrics = {
        "recall@1": mean((rank < 1).astype(jnp.float32)),
        "recall@10": mean((rank < 10).astype(jnp.float32)),
        "mrr": mean(1.0 / (1.0 + rank.astype(jnp.float32))),
        "negatives": mean(negatives),
        "cosine/positive": mean(right),
        "cosine/negative": mean(jnp.sum(jnp.where(allowed & ~positive, cosines, 0.0), 1) / jnp.maximum(negatives, 1.0)),
    }
    return Loss(mean(jnp.mean(jnp.stack(losses), 0)), metrics)


def _negative_logp(scores: "Float[Array, 'N R']", positive: "Bool[Array, 'N R']", allowed: "Bool[Array, 'N R']") -> "Float[Array, 'N']":
    """Computes minus the log-probability of the positive of each row, by a softmax over the row's positive and its allowed columns."""
    import jax
    import jax.numpy as jnp

    scores = jnp.where(allowed | positive, scores, -jnp.inf)
    return jax.nn.logsumexp(scores, 1) - jnp.sum(jnp.where(positive, scores, 0.0), 1)
