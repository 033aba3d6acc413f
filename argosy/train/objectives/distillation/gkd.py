"""On-policy distillation, or generalized knowledge distillation (GKD): Agarwal et al. 2023, arXiv:2306.13649.

    mean over the tokens of completions of T^2 D(teacher, student)

The student samples completions of prompts. D is a divergence at temperature T (`train.objectives.distillation.distributions`). No
gradient flows through sampling. Differences from the paper: none. The paper's lambda is the setting `student_fraction`.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also
from argosy.train.objectives.distillation.teacher import DivergenceObjective
from argosy.train.objectives.objective import Needs

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models


class GKD(DivergenceObjective):
    """On-policy distillation (generalized knowledge distillation, arXiv:2306.13649): the student answers prompts, and at each token of
    its own answers its distribution goes to the teacher's. A share of the batches may have the data's answers instead."""

    student_fraction: Annotated[float, Also("lmbda", "lambda")] = Field(0.5, ge=0, le=1)
    """Share of the batches whose completions the student samples with its current weights. The others have completions of the source
    `others`. The seed decides the source of each batch. 0.5 as in TRL; with 1 the student learns from its own completions alone, and
    needs prompts only.
    """
    others: Annotated[Literal["data", "teacher"], Also("seq_kd", note="objective.others=teacher is that")] = "data"
    """Source of the other completions. data: the data; teacher: it samples them (arXiv:1606.07947)."""
    sampling: float = Field(1.0, gt=0)
    """Temperature of sampling. It is TRL's `temperature`; ours is the temperature of the divergence."""
    divergence: Literal["forward", "reverse", "jsd"] = "jsd"

    needs: ClassVar[Needs] = Needs(rollouts="teacher", metrics=("kl", "agreement"))

    @model_validator(mode="after")
    def _others_are_read(self) -> "GKD":
        if self.student_fraction == 1 and self.others != "data":
            raise ValueError(f"others = {self.others} with student_fraction = 1: every batch has the student's own completions")
        return self

    def reads(self) -> "Fields":
        from argosy.train.objectives.tokens import FIELDS

        return FIELDS

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.distillation.distributions import distillation_loss

        return distillation_loss(self, models, batch)
