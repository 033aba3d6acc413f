"""What every objective is: a function `(models, batch, key) -> Loss` that declares what it reads and needs. No jax is imported here.

An objective is usually a class of settings that derives from `Objective` too. It is pure: the same arguments give the same loss.
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

    rows_per_group: how many rows of a batch belong together (2: a preference pair); they are never split.
    formats: the formats of records that it trains on (`data.sources.records`); none: those with one row an example.
    least_groups: the fewest groups of a batch with which it makes sense.
    scores: how many scores the model's head gives, in place of logits.
    labels: the head gives a score for each class of the data, or one for a number.
    encoders: it trains encoders too.
    inputs: what the models that it trains read (`ModelConfig.inputs`).
    rollouts: batches are completions that the model samples, and it learns from their rewards or from a teacher; none: from data.
    metrics: those that an evaluation reports beside the perplexity.
    whole_batch: its loss compares the examples of a batch with one another, so that a part of a batch is another loss.
    forward: it differentiates the model forward too, which implementations with a backward pass of their own do not.
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
        """The format of records that it trains on, where that is never detected but asked for."""
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
        """How the trained model makes one vector of the vectors of a text's tokens; None: it makes none."""
        return None

    @property
    def config_entries(self) -> dict[str, Any]:
        """What a model's config.json says of its training by this objective."""
        return {}

    @property
    def roles(self) -> Mapping[str, str]:
        """The frozen models that it compares with, and where their numbers come from.

        online: the model is in `models` under its role. cached: numbers are computed before the first step, and batches hold them.
        rollout: they are computed with each rollout.
        """
        return {}

    @property
    def trained_parts(self) -> frozenset[str]:
        """Names of the parts that are trained beside the model (`train.beside`)."""
        return frozenset()

    def reads(self) -> "Fields":
        """The arrays of a batch that the objective reads, by name."""
        raise NotImplementedError

    def batch_means(self, models: "Models", batch: dict[str, Any], key: Any) -> "dict[str, WeightedMean]":
        """Means over the whole batch that the loss reads, without gradient.

        Where a batch is computed in parts, they are computed first, over all parts, and each part's batch then holds them as scalars.
        A batch that is computed at once does not hold them: the loss computes its own. The models have no dropout there.
        """
        return {}

    def derived(self, figures: dict[str, float]) -> dict[str, float]:
        """Figures of an evaluation that follow from the means over all its batches, by name."""
        return {}

    def __call__(self, models: "Models", batch: dict[str, Any], key: Any) -> "Loss":
        """Computes the loss."""
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
