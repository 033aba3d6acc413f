"""The interface of objectives. An objective is a function `(models, batch, key) -> Loss` that declares what it reads and needs.

An objective is usually a class of settings that also derives from `Objective`. It is pure: the same arguments give the same loss. This
file imports no jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.settings import Settings
from argosy.data.sources.records import ASKED_FOR, PROMPT

if TYPE_CHECKING:
    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean


@dataclass(frozen=True)
class Needs:
    """What an objective needs of data and models, whatever its settings.

    rows_per_group: the number of rows of a batch that form a group, which is never split. A preference pair is a group of 2.
    formats: the formats of records that the objective trains on (`data.sources.records`). Empty: all formats with one row per example.
    least_groups: the smallest number of groups in a batch that makes sense.
    scores: the number of scores that the model's head gives instead of logits; 0 for logits.
    labels: whether the head gives one score for each class of the data, or a single score if labels are numbers.
    encoders: whether the objective can train encoders too.
    inputs: the kind of input of the models that the objective trains (`ModelConfig.inputs`).
    rollouts: `none` if batches are data. Otherwise batches are completions that the model samples, and the objective learns from their
        `rewards` or from a `teacher`.
    metrics: the names of metrics that an evaluation reports beside the perplexity.
    whole_batch: whether the loss compares the examples of a batch with one another, so that micro-batches would give another loss.
    forward: whether the objective also differentiates the model in forward mode. Implementations with a custom backward pass cannot.
    """

    rows_per_group: int = 1
    formats: tuple[str, ...] = ()
    least_groups: int = 1
    scores: int = 0
    labels: bool = False
    encoders: bool = False
    inputs: Literal["tokens", "clicks", "images"] = "tokens"
    rollouts: Literal["none", "rewards", "teacher"] = "none"
    metrics: tuple[str, ...] = ()
    whole_batch: bool = False
    forward: bool = False

    @property
    def asked_format(self) -> str | None:
        """The format of records that the objective trains on, if the data loader must be told it because it cannot detect it."""
        return next((name for name in self.formats if name in ASKED_FOR and name != PROMPT), None)


class Objective:
    """The loss that training minimizes. `needs` belongs to the class; properties depend on settings."""

    needs: ClassVar[Needs] = Needs()

    @property
    def rows_per_group(self) -> int:
        """`Needs.rows_per_group`, with these settings."""
        return self.needs.rows_per_group

    @property
    def formats(self) -> tuple[str, ...]:
        """`Needs.formats`, with these settings."""
        return self.needs.formats

    @property
    def text_pooling(self) -> str | None:
        """The pooling by which the trained model makes one vector of a text; None if the model does not embed texts."""
        return None

    @property
    def config_entries(self) -> dict[str, Any]:
        """The entries that this objective adds to the config.json of a trained model."""
        return {}

    @property
    def roles(self) -> Mapping[str, str]:
        """The frozen models that the objective compares with, by role, and when their outputs are computed.

        `online`: the loss computes them; the model is in `models` under its role. `cached`: they are computed before the first step,
            and
        batches hold them. `rollout`: they are computed with each rollout.
        """
        return {}

    @property
    def trained_parts(self) -> frozenset[str]:
        """The names of the auxiliary modules that are trained with the model (`train.beside`)."""
        return frozenset()

    def reads(self) -> "Fields":
        """Returns the fields of a batch that the objective reads, by name."""
        raise NotImplementedError

    def batch_means(self, models: "Models", batch: dict[str, Any], key: Any) -> "dict[str, WeightedMean]":
        """Computes means over the whole batch that the loss reads, without gradient.

        If a batch is computed in micro-batches, these means are computed first, over all micro-batches, and each micro-batch then holds
        them as scalars. If a batch is computed at once, it does not hold them, and the loss computes them itself. The models have no
        dropout here.
        """
        return {}

    def derived(self, figures: dict[str, float]) -> dict[str, float]:
        """Computes figures of an evaluation, by name, that follow from the means over all its batches.

        Args:
            figures: these means, by name.
        """
        return {}

    def __call__(self, models: "Models", batch: dict[str, Any], key: Any) -> "Loss":
        """Computes the loss of a batch or micro-batch.

        Args:
            models: the trained model as `model`, and the frozen models by role.
            batch: the arrays that `reads` names.
            key: the random key of the step.
        """
        raise NotImplementedError


class TokenObjective(Settings, Objective):
    """An objective that reads log-probabilities of tokens."""

    head: Literal["auto", "logits", "blocks", "chunks"] = "auto"
    """How the loss over the vocabulary is computed. logits: all at once; blocks: one block of the vocabulary at a time, fastest
    on CPUs; chunks: a part at a time, recomputed in the backward pass, to save memory: of the vocabulary, so that devices gather the
    head's weight twice a step, or of the rows if the head is more than a product (a bias, an adapter, few bits). auto: chunks if the
    logits would take more than 2 GiB per device, otherwise the fastest. All agree to rounding, also in bfloat16."""
    chunk: int = Field(1024, gt=0)
    """With `head: chunks`, logits take the memory of so many rows on each device."""
