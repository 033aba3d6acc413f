"""Distillation (Hinton et al. 2015, arXiv:1503.02531): the student learns the teacher's next-token distribution.

    (1 - c) T^2 D(teacher, student) + c cross-entropy(labels) [+ w H(teacher, student)] [+ sum of a R(teacher, student)]

D is a divergence at temperature T (`ops.divergence`), and c is the setting `cross_entropy`. The factor T^2 is from Hinton et al.
(section 2): gradients of soft targets shrink as 1/T^2, so without the factor the meaning of c would depend on the temperature.
DistilBERT (arXiv:1910.01108) has the factor too; TRL's GKDTrainer and torchtune do not. At T = 1 it makes no difference.

H is an optional term that compares hidden states: the input of the head, or the outputs of pairs of layers, averaged over pairs. It is
1 - cosine, as in DistilBERT, or the mean squared difference over features, as in TinyBERT (arXiv:1909.10351, equation 8, which sums
over layers). If the widths differ, the student's hidden states go through a learned projection first
(`train.objectives.distillation.projection`).

R is an optional term that compares relations of tokens within layers by their divergence (`ops.relations`). The layers are the last
ones (MiniLM, arXiv:2002.10957), or pairs of layers, averaged over pairs. R counts at the tokens whose targets count.

Differences from TRL's GKDTrainer (1.9): sums over targets are divided by the weight of the whole batch, as TRL does where it knows the
number of items; TRL's `batchmean` is the mean over the targets of a micro-batch. TRL's beta of 0 and 1 are `forward` and `reverse`
here; between them the mixture is the same. TRL caches the top k tokens only for servers, with a tail of 1 minus the sum of the others.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also
from argosy.train.beside import PROJECTION
from argosy.train.objectives.distillation.teacher import ROLE, DivergenceObjective, LayerTerms

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models


class Distill(DivergenceObjective):
    """Distillation of a teacher's next-token distributions on given text (arXiv:1503.02531)."""

    teacher_model: str | None = None
    """Name of the model on the server, if the teacher is the address of a server (`objective.teacher=http://localhost:8000/v1`)."""
    logits: Literal["online", "cached"] = "online"
    """Source of the teacher's distributions. online: the teacher computes them in every step, over the whole vocabulary. cached: its
    `top` most likely tokens are computed once before the first step, for every target that the run visits, and stored on disk; then no
    teacher is in memory, and other runs reuse the cache.
    """
    top: Annotated[int, Also("topk_logits_k", "loss_top_k", note="with objective.logits=cached")] = Field(64, gt=0)
    """Number of tokens in a cached distribution. All other tokens count as one outcome with the remaining probability; NeMo-RL keeps 64
    too.
    """
    cross_entropy: Annotated[float, Also("kd_ratio", "kd_alpha", note="kd_ratio is 1 minus it")] = Field(0.5, ge=0, lt=1)
    """Share of the cross-entropy with the labels in the loss; the divergence has the rest. torchtune's recipes use half."""
    hidden: Literal["none", "cosine", "mse"] = "none"
    """Also matches the student's last hidden states, the input of its head, to the teacher's. cosine: 1 minus their cosine (DistilBERT,
    arXiv:1910.01108); mse: their mean squared difference (TinyBERT, arXiv:1909.10351). If the teacher has another width, a projection
    of the student's is trained with it. The teacher must be online.
    """
    hidden_weight: float = Field(1.0, gt=0)
    """Weight of `hidden`, which is added to the loss."""
    relations: dict[Literal["qq", "kk", "vv", "qk"], float] = Field(default_factory=dict)
    """Also matches relations between tokens within a layer to the teacher's, each kind with its weight (MiniLMv2, arXiv:2012.15828):
    `objective.relations.qq=1 objective.relations.kk=1 objective.relations.vv=1` relates queries, keys and values to each other, `qk`
    queries to keys, as attention does. Widths and numbers of heads may differ. The teacher must be online.
    """
    relation_heads: int | None = Field(None, gt=0)
    """Number of relations of each kind in a layer: the features of all its heads are divided into this many parts. None: the student's
    number of heads. MiniLMv2 uses 48 to 64, more than there are heads.
    """
    layers: Annotated[dict[int, int], Also("alignment_layers", "layers_to_distill")] = Field(default_factory=dict)
    """Pairs of layers that `hidden` and `relations` compare, counted from 0: `objective.layers.1=3` matches the output of the student's
    layer 1 to that of the teacher's layer 3 (TinyBERT, arXiv:1909.10351); several pairs are averaged. Empty: the last hidden states,
    and the relations of the last layers (MiniLM, arXiv:2002.10957).
    """

    @model_validator(mode="after")
    def _served_is_cached(self) -> "Distill":
        served = self.teacher.startswith(("http://", "https://"))
        if not served and self.teacher_model is not None:
            raise ValueError("teacher_model is for a teacher that is the address of a server, such as http://localhost:8000/v1")
        if served and self.teacher_model is None:
            raise ValueError("teacher_model is missing: the name of the teacher at its server, one of GET /v1/models")
        if served and self.logits != "cached":
            raise ValueError("logits = online with a teacher that is a server: logits=cached asks it once before the first step")
        if served and self.temperature != 1:
            raise ValueError(f"temperature = {self.temperature:g}: a server gives log-probabilities at temperature 1")
        return self

    @model_validator(mode="after")
    def _is_read(self) -> "Distill":
        if self.logits == "online" and "top" in self.model_fields_set and self.top != 64:
            raise ValueError(f"top = {self.top} with logits = online, which has the whole vocabulary: logits=cached reads it")
        if self.hidden == "none" and "hidden_weight" in self.model_fields_set and self.hidden_weight != 1:
            raise ValueError(f"hidden_weight = {self.hidden_weight:g} with hidden = none: hidden=cosine or mse reads it")
        if self.hidden == "none" and not self.relations and self.layers:
            raise ValueError("layers with hidden = none: hidden=cosine or mse says how they are compared, or `relations`")
        if not self.relations and self.relation_heads is not None:
            raise ValueError(f"relation_heads = {self.relation_heads} without relations: relations.qq=1 would read it")
        if wrong := [f"{name} = {weight:g}" for name, weight in self.relations.items() if not 0 < weight < math.inf]:
            raise ValueError(f"relations: {', '.join(wrong)}: a weight is a number above 0")
        if self.relations and self.logits == "cached":
            raise ValueError("relations with logits = cached, which keeps no layers: logits=online has them")
        if self.hidden != "none" and self.logits == "cached":
            raise ValueError(f"hidden = {self.hidden} with logits = cached, which keeps no hidden states: logits=online has them")
        return self

    @property
    def roles(self) -> Mapping[str, str]:
        return {ROLE: self.logits}

    @property
    def trained_parts(self) -> frozenset[str]:
        return frozenset() if self.hidden == "none" else frozenset([PROJECTION])

    @property
    def layer_terms(self) -> LayerTerms:
        return LayerTerms(self.hidden, self.hidden_weight, self.layers, self.relations, self.relation_heads)

    @property
    def label_share(self) -> float:
        return self.cross_entropy

    @property
    def may_be_server(self) -> bool:
        return True

    def reads(self) -> "Fields":
        from argosy.train.objectives.distillation.distributions import CACHED
        from argosy.train.objectives.tokens import FIELDS

        return {**FIELDS, **(CACHED if self.logits == "cached" else {})}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.distillation.distributions import distillation_loss

        return distillation_loss(self, models, batch)
