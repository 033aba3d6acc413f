"""Universal logit distillation on the student's own completions, after TRL's GOLD (general online logit distillation).

The loss is that of `train.objectives.distillation.uld`, over completions that the student samples. Differences from TRL 1.16: those of
`uld`; and the cross-entropy of labels applies only to completions of the data.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also
from argosy.train.objectives.distillation.uld import ULD
from argosy.train.objectives.objective import Needs

if TYPE_CHECKING:
    from argosy.data.batch import Fields


class GOLD(ULD):
    """On-policy distillation across tokenizers, after TRL's GOLD (general online logit distillation): the student answers prompts, a
    teacher with another tokenizer reads the answers as text, and where both tokenize them into the same bytes the student's
    probabilities, sorted, go to the teacher's. A share of the batches may have the data's answers instead."""

    needs: ClassVar[Needs] = Needs(rollouts="teacher", metrics=("uld", "aligned"))

    student_fraction: Annotated[float, Also("lmbda", "lambda")] = Field(0.5, ge=0, le=1)
    """Share of the batches whose completions the student samples with its current weights. The others have the data's. The seed decides
    the source of each batch. With 1 the student learns from its own completions alone, and needs prompts only.
    """
    others: Literal["data", "teacher"] = "data"
    """Source of the other completions. data: the data. Completions by a teacher with another tokenizer are not supported."""
    sampling: float = Field(1.0, gt=0)
    """Temperature of sampling; `temperature` is the temperature of the distance."""
    template: Literal["teacher", "student"] = "teacher"
    """How the teacher reads conversations. teacher: rendered by its own chat template; student: as the text of the student's template,
    in which special tokens become the teacher's of the same role, or their names.
    """
    cross_entropy: Annotated[float, Also("uld_crossentropy_weight")] = Field(0.0, ge=0)
    """Weight of the cross-entropy with the labels, for batches with the data's completions. It is 0 in TRL's GOLD, where it applies to
    all completions.
    """
    weight: Annotated[float, Also("uld_distillation_weight")] = Field(1.0, gt=0)
    """Weight of the distance of sorted probabilities; 1 in TRL's GOLD."""

    @model_validator(mode="after")
    def _others_are_given(self) -> "GOLD":
        if self.others == "teacher":
            raise ValueError(
                "others = teacher is not built across tokenizers: others=data, or have the teacher answer the prompts into a file "
                "(`argosy run-batch`) and learn from that"
            )
        if self.student_fraction == 1 and "cross_entropy" in self.model_fields_set and self.cross_entropy:
            raise ValueError(f"cross_entropy = {self.cross_entropy:g} with own = 1: no answer is the data's, which alone have labels")
        return self

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        # The weight of each target's label, 0 in the student's own completions.
        return {**super().reads(), "labels": BatchField("B T", np.float32)}
