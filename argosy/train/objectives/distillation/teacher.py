"""Shared settings of objectives with a teacher: how the teacher's distributions are compared with the student's. This file imports no
jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings
from argosy.train.objectives.objective import Needs, Objective

ROLE = "teacher"


@dataclass(frozen=True)
class LayerTerms:
    """Comparisons of layers, in addition to the comparison of distributions. By default there are none.

    hidden: the distance by which hidden states are compared; "none" if they are not.
    hidden_weight: the weight of this comparison in the loss.
    layers: the pairs {layer of the student: layer of the teacher} to compare. If empty, the inputs of the heads and the relations of
        the last layers are compared.
    relations: the weight of each kind of relation in the loss.
    relation_heads: the number of heads into which each kind of relation is split; None: the student's number of heads.
    """

    hidden: Literal["none", "cosine", "mse"] = "none"
    hidden_weight: float = 0.0
    layers: Mapping[int, int] = field(default_factory=dict)
    relations: Mapping[Any, float] = field(default_factory=dict)
    relation_heads: int | None = None

    @property
    def related_layers(self) -> list[tuple[int, int]]:
        """The layers, of student and teacher, whose relations are compared."""
        return list(self.layers.items()) or [(-1, -1)]


class TeacherObjective(Settings, Objective):
    """An objective that learns from a teacher, a frozen model."""

    teacher: Annotated[str, Also("teacher_model_name_or_path", "teacher_model")]
    """The teacher, with its own tokenizer: Hub folder, GGUF file, run directory or checkpoint."""

    @property
    def roles(self) -> Mapping[str, str]:
        return {ROLE: "online"}

    @property
    def layer_terms(self) -> LayerTerms:
        """The layers that are compared too."""
        return LayerTerms()

    @property
    def needs_teacher_ids(self) -> bool:
        """Whether the loss is infinite at ids that the teacher lacks."""
        return False

    @property
    def may_be_server(self) -> bool:
        """Whether the teacher may be the address of a server."""
        return False


class DivergenceObjective(TeacherObjective):
    """Common settings of objectives with a divergence: the teacher, and how its distributions are compared with the student's."""

    teacher: Annotated[
        str, Also("teacher_model_name_or_path", "teacher_model")
    ] = Field(examples=["TEACHER_FOLDER"])
    """The model to learn from, a Hub folder, GGUF file, run directory or checkpoint. Its tokens must equal the student's; architecture
    and size may differ.
    """
    divergence: Annotated[
        Literal["forward", "reverse", "jsd"], Also("kl_type", note="TRL's beta: 0 is forward, 1 reverse")
    ] = "forward"
    """The divergence to minimize. forward: KL(teacher || student); reverse: KL(student || teacher); jsd: generalized Jensen-Shannon
    with `beta` (arXiv:2306.13649).
    """
    beta: float = Field(0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of `divergence: jsd`: 0.5 is the usual Jensen-Shannon divergence."""
    temperature: Annotated[float, Also("kd_temperature")] = Field(1.0, gt=0)
    """Both distributions are softmax(logits / temperature), and the divergence is multiplied by its square, which keeps the size of
    the gradient (arXiv:1503.02531, section 2)."""
    head: Literal["auto", "logits", "chunks"] = "auto"
    """How the two distributions are compared. logits: all at once; chunks: some rows at a time, recomputed in the backward pass, to
    save memory. auto: chunks if the logits of both would take more than 2 GiB per device. They agree to rounding."""
    chunk: int = Field(1024, gt=0)
    """Rows of logits that exist at once on each device with `head: chunks`."""

    needs: ClassVar[Needs] = Needs(metrics=("kl", "agreement"))

    @property
    def label_share(self) -> float:
        """The share of the labels' cross-entropy in the loss; the divergence has the rest."""
        return 0.0

    @property
    def needs_teacher_ids(self) -> bool:
        return self.divergence == "reverse" and self.roles[ROLE] == "online"

    @model_validator(mode="after")
    def _beta_is_read(self) -> "DivergenceObjective":
        if self.divergence != "jsd" and "beta" in self.model_fields_set and self.beta != 0.5:
            raise ValueError(f"beta = {self.beta:g} with divergence = {self.divergence}: only jsd reads it")
        return self
