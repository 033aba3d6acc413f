"""Text classification: the class of a text, several classes, or a number.

    single_label_classification     -log softmax(z)_y
    multi_label_classification      -sum_c [y_c log s(z_c) + (1 - y_c) log(1 - s(z_c))] / Z
    regression                      (z - y)^2

z are the scores of a text, y is its label, s the logistic function, and Z the number of classes. These are the losses of transformers'
ForSequenceClassification; the model's config keeps its `problem_type`.

Difference from transformers: if the type is not set, the data decide it here; transformers takes a single score for a regression.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from argosy.core.settings import Settings
from argosy.data.labels import MULTIPLE, REGRESSION, SINGLE
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean

# Figures of single classes are written for at most so many.
MOST_CLASSES = 30
F1, SHARE = "f1/", "share/"


class Classify(Settings, Objective):
    """Text classification and regression, by the losses of transformers' ForSequenceClassification."""

    needs: ClassVar[Needs] = Needs(formats=("classification",), labels=True, encoders=True)

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of a text's weight that is spread evenly over all classes, for texts with one class (Szegedy et al. 2015,
    arXiv:1512.00567). 0: off.
    """

    def reads(self) -> "Fields":
        from argosy.train.objectives.texts.batch import LABELS, TEXTS

        return {**TEXTS, "label": LABELS}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax.numpy as jnp

        from argosy.train.objectives.routers import with_routers
        from argosy.train.objectives.texts.batch import batch_scores

        model = models["model"]
        scores, aux = batch_scores(model, batch)
        loss = classification_loss(self, scores, batch["label"], batch["live"], model.config.problem_type, model.config.label_names)
        return with_routers(loss, model, aux, jnp.sum(batch["live"], 1))

    def derived(self, figures: dict[str, float]) -> dict[str, float]:
        """Computes the mean F1 of the classes, and the accuracy of always answering the most frequent class."""
        metrics = {}
        if f1 := [value for name, value in figures.items() if name.startswith(F1)]:
            metrics["f1_macro"] = sum(f1) / len(f1)
        if shares := [value for name, value in figures.items() if name.startswith(SHARE)]:
            metrics["majority_accuracy"] = max(shares)
        return metrics


def classification_loss(
    settings: Classify,
    scores: "Float[Array, 'B s Z']",
    label: "Float[Array, 'B s z']",
    live: "Float[Array, 'B s']",
    problem_type: str | None,
    names: tuple[str, ...],
) -> "Loss":
    """Computes the loss of a batch from the scores of its texts.

    Args:
        label: [B s 1], the index of the class, or the target of a regression; or [B s Z], 0 or 1 for each class.
        live: 1 where a slot holds a text.
        problem_type: one of the three types above. None: the shapes of scores and labels decide.
        names: the names of the classes.
    """
    import jax
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss, WeightedMean

    def mean(values: "Array") -> "WeightedMean":
        return WeightedMean(jnp.sum(jnp.where(live > 0, values, 0.0)), jnp.sum(live))

    if problem_type is None and scores.shape[-1] == 1:
        problem_type = REGRESSION
    elif problem_type is None:
        problem_type = MULTIPLE if label.shape[-1] > 1 else SINGLE
    if problem_type == REGRESSION:
        apart = scores[..., 0] - label[..., 0]
        return Loss(mean(apart**2), {"mae": mean(jnp.abs(apart))})
    if problem_type == MULTIPLE:
        each = jnp.mean(jnp.maximum(scores, 0) - scores * label + jnp.log1p(jnp.exp(-jnp.abs(scores))), -1)
        predicted, true = (scores > 0).astype(jnp.float32), (label > 0.5).astype(jnp.float32)
        metrics = {"accuracy": mean(jnp.all(predicted == true, -1).astype(jnp.float32))}
        return Loss(mean(each), metrics | of_classes(predicted, true, live, names, shares=False))
    index = label[..., 0].astype(jnp.int32)
    logp = jax.nn.log_softmax(scores)
    each = -jnp.take_along_axis(logp, index[..., None], -1)[..., 0]
    if settings.label_smoothing:
        each = (1 - settings.label_smoothing) * each - settings.label_smoothing * jnp.mean(logp, -1)
    best = jnp.argmax(scores, -1)
    predicted, true = (jax.nn.one_hot(i, scores.shape[-1], dtype=jnp.float32) for i in (best, index))
    metrics = {"accuracy": mean((best == index).astype(jnp.float32))}
    return Loss(mean(each), metrics | of_classes(predicted, true, live, names, shares=True))


def of_classes(
    predicted: "Float[Array, 'B s Z']",
    true: "Float[Array, 'B s Z']",
    live: "Float[Array, 'B s']",
    names: tuple[str, ...],
    *,
    shares: bool,
) -> "dict[str, WeightedMean]":
    """Computes the F1 of each class. F1 is 2 TP / (predicted + true), as a mean whose weight is the denominator, so it is exact over
    any number of batches.

    Args:
        predicted, true: 1 where the text is predicted to be, or is, in the class.
        shares: whether the share of texts in each class is computed too.
    """
    import jax.numpy as jnp

    from argosy.train.objectives.loss import WeightedMean

    if len(names) > MOST_CLASSES:
        return {}
    predicted, true = predicted * live[..., None], true * live[..., None]
    both, either, texts = jnp.sum(predicted * true, (0, 1)), jnp.sum(predicted + true, (0, 1)), jnp.sum(live)
    metrics = {f"{F1}{name}": WeightedMean(2 * both[i], either[i]) for i, name in enumerate(names)}
    counts = jnp.sum(true, (0, 1))
    return metrics | ({f"{SHARE}{name}": WeightedMean(counts[i], texts) for i, name in enumerate(names)} if shares else {})
