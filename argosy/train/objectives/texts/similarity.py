"""Sentence encoders by graded similarity: of two pairs of texts, the one with the higher score is to have the higher cosine.

    log(1 + sum_{y_i > y_j} exp(s (cos_j - cos_i)))        over the pairs i, j of a batch

y is the score of a pair of texts, cos the cosine of their vectors, and s the scale. This is CoSENT (Su 2022, kexue.fm/archives/8847),
sentence-transformers' CoSENTLoss. Only the order of scores matters, so they may be on any scale.

Differences from sentence-transformers: none.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from argosy.core.settings import Also, Settings
from argosy.train.objectives.objective import Needs, Objective
from argosy.train.objectives.texts.contrastive import Pooling

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models


class Similarity(Settings, Objective):
    """Sentence encoders, by scores of how similar two texts are."""

    needs: ClassVar[Needs] = Needs(
        rows_per_group=2, formats=("similarity",), least_groups=2, encoders=True, whole_batch=True
    )

    scale: float = Field(20.0, gt=0)
    """What differences of cosines are multiplied with."""
    pooling: Annotated[Pooling | None, Also("pooling_mode")] = None
    """How the vectors of tokens become one. None: as the folder of the model says; without one,
    mean for encoders and last for language models."""
    include_prompt: bool = True
    """Whether the vectors of a prompt's tokens (`data.prompts`) are pooled too."""

    @property
    def text_pooling(self) -> str:
        return self.pooling or "mean"

    def reads(self) -> "Fields":
        from argosy.train.objectives.texts.batch import LABELS, vector_fields

        return {**vector_fields(self.include_prompt), "label": LABELS}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.routers import with_routers
        from argosy.train.objectives.texts.batch import batch_vectors, unit_rows

        vectors, aux = batch_vectors(models["model"], batch, self.text_pooling)
        vectors = unit_rows(vectors)
        cosines = (vectors[::2] * vectors[1::2]).sum(-1)
        loss = similarity_loss(self, cosines, batch["label"][::2, :, 0], batch["live"][::2])
        return with_routers(loss, models["model"], aux, batch["live"].sum(1))


def similarity_loss(
    settings: Similarity, cosines: "Float[Array, 'P s']", label: "Float[Array, 'P s']", live: "Float[Array, 'P s']"
) -> "Loss":
    """Computes the loss of a batch. Its weight is the number of pairs.

    Args:
        cosines: the cosine of each pair's vectors.
        label: the score of each pair.
        live: 1 where there is a pair.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean

    cosines, label, valid = (a.reshape(-1) for a in (cosines, label, live > 0))
    above = (label[:, None] > label[None]) & valid[:, None] & valid[None]
    apart = jnp.where(above, settings.scale * (cosines[None] - cosines[:, None]), -jnp.inf)
    loss, count = jax.nn.logsumexp(jnp.append(apart.reshape(-1), 0.0)), jnp.sum(live)
    right = jnp.sum(jnp.where(above, jnp.where(apart < 0, 1.0, jnp.where(apart == 0, 0.5, 0.0)), 0.0))
    metrics = {
        "ordered": WeightedMean(right, jnp.sum(above.astype(jnp.float32))),
        "cosine": WeightedMean(jnp.sum(jnp.where(valid, cosines, 0.0)), count),
    }
    return Loss(WeightedMean(loss * count, count), metrics)
