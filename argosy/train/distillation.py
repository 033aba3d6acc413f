"""The settings of distillation, without jax: a student learns from a teacher's distributions. Each is also the objective's function.

    distill    on given text                                       arXiv:1503.02531
    gkd        on answers of the student's own, and on given ones   arXiv:2306.13649
    uld        on given text, of a teacher with another tokenizer   arXiv:2402.12030
    gold       the same on the student's own answers, and on given ones
"""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings


class OfTeacher(Settings):
    """What every kind of distillation has: the teacher, and how its distributions are compared with the student's."""

    teacher: Annotated[
        str, Also("teacher_model_name_or_path", "teacher_model")
    ] = Field(examples=["TEACHER_FOLDER"])
    """The model to learn from, a Hub folder, GGUF file, run directory or checkpoint. Its tokens must be the student's; its
    architecture and size may be others."""
    divergence: Annotated[
        Literal["forward", "reverse", "jsd"], Also("kl_type", note="TRL's beta: 0 is forward, 1 reverse")
    ] = "forward"
    """What is minimized. forward: KL(teacher || student); reverse: KL(student || teacher); jsd: generalized Jensen-Shannon with
    `beta` (arXiv:2306.13649)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of `divergence: jsd`: 0.5 is the usual Jensen-Shannon divergence."""
    temperature: Annotated[float, Also("kd_temperature")] = Field(1.0, gt=0)
    """Both distributions are softmax(logits / temperature), and the divergence is multiplied by its square, which keeps the size of
    the gradient (arXiv:1503.02531, section 2)."""
    head: Literal["auto", "logits", "chunks"] = "auto"
    """How the two distributions are compared. logits: all at once; chunks: some rows at a time, recomputed in the backward pass, to
    save memory. auto: chunks if the logits of both would take more than 2 GiB per device. They agree to rounding."""
    chunk: int = Field(1024, gt=0)
    """Rows of logits that exist at once with `head: chunks`."""

    rows_per_group: ClassVar[int] = 1
    evaluated: ClassVar[tuple[str, ...]] = ("kl", "agreement")

    @model_validator(mode="after")
    def _beta_is_read(self) -> "OfTeacher":
        if self.divergence != "jsd" and "beta" in self.model_fields_set and self.beta != 0.5:
            raise ValueError(f"beta = {self.beta:g} with divergence = {self.divergence}: only jsd reads it")
        return self

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.distill import loss

        return loss(self, models, batch)  # type: ignore[arg-type]


class Distill(OfTeacher):
    """Distillation of a teacher's next-token distributions on given text (arXiv:1503.02531; `train.objectives.distill`)."""

    teacher_model: str | None = None
    """Of a teacher that is the address of a server (`objective.teacher=http://localhost:8000/v1`): the name of the model there."""
    logits: Literal["online", "cached"] = "online"
    """Where the teacher's distributions come from. online: the teacher computes them in every step, over the whole vocabulary.
    cached: its `top` likeliest tokens are computed once before the first step, for every target that the run visits, and kept on
    disk; no teacher is then in memory, and other runs find them."""
    top: Annotated[int, Also("topk_logits_k", "loss_top_k", note="with objective.logits=cached")] = Field(64, gt=0)
    """Tokens of a cached distribution. All others are one outcome more, whose probability is the rest; NeMo-RL keeps 64 too."""
    cross_entropy: Annotated[float, Also("kd_ratio", "kd_alpha", note="kd_ratio is 1 minus it")] = Field(0.5, ge=0, lt=1)
    """Share of the cross-entropy of the labels in the loss; the divergence has the rest. torchtune's recipes take half."""
    hidden: Literal["none", "cosine", "mse"] = "none"
    """Also brings the student's last hidden states, the input of its head, to the teacher's. cosine: 1 minus their cosine
    (DistilBERT, arXiv:1910.01108); mse: their mean squared difference (TinyBERT, arXiv:1909.10351). Where the teacher has another
    width, a projection of the student's is trained beside it. The teacher must be online."""
    hidden_weight: float = Field(1.0, gt=0)
    """Weight of `hidden`, which is added to the loss."""
    relations: dict[Literal["qq", "kk", "vv", "qk"], float] = Field(default_factory=dict)
    """Also brings relations of tokens within a layer to the teacher's, each with its weight (MiniLMv2, arXiv:2012.15828):
    `objective.relations.qq=1 objective.relations.kk=1 objective.relations.vv=1` relates queries, keys and values to each other, `qk`
    queries to keys, as attention does. Widths and numbers of heads may differ. The teacher must be online."""
    relation_heads: int | None = Field(None, gt=0)
    """How many relations of each kind a layer has: the features of all its heads are cut into so many parts. None: as many as the
    student has heads. MiniLMv2 takes 48 to 64, more than there are heads."""
    layers: Annotated[dict[int, int], Also("alignment_layers", "layers_to_distill")] = Field(default_factory=dict)
    """Which layers `hidden` and `relations` compare, counted from 0: `objective.layers.1=3` brings the output of the student's layer 1
    to that of the teacher's layer 3 (TinyBERT, arXiv:1909.10351); of several pairs it is the mean. Empty: the last hidden states, and
    the relations of the last layers (MiniLM, arXiv:2002.10957)."""

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

    def reads(self) -> Any:
        from argosy.train.objectives.distill import CACHED, FIELDS

        return {**FIELDS, **(CACHED if self.logits == "cached" else {})}


class GKD(OfTeacher):
    """On-policy distillation (generalized knowledge distillation, arXiv:2306.13649): the student answers prompts, and at each token of
    its own answers its distribution goes to the teacher's. A share of the batches may have the data's answers instead."""

    own: Annotated[float, Also("lmbda", "lambda")] = Field(0.5, ge=0, le=1)
    """Share of the batches whose answers are the student's own, sampled with its weights of the moment. The others have those of
    `others`. Which batch is which follows from the seed. 0.5 as in TRL; 1 learns from its own answers alone, and needs prompts only."""
    others: Annotated[Literal["data", "teacher"], Also("seq_kd", note="objective.others=teacher is that")] = "data"
    """Where the other answers come from. data: they are in the data; teacher: it samples them (arXiv:1606.07947)."""
    sampling: float = Field(1.0, gt=0)
    """Temperature at which answers are sampled. TRL's `temperature` is this alone; ours is that of the divergence."""
    divergence: Literal["forward", "reverse", "jsd"] = "jsd"

    # Its batches are rollouts, which are compared by what the teacher says of them, not by rewards.
    on_policy: ClassVar[bool] = True
    rewarded: ClassVar[bool] = False
    logits: ClassVar[str] = "online"
    hidden: ClassVar[str] = "none"
    hidden_weight: ClassVar[float] = 0.0
    layers: ClassVar[dict[int, int]] = {}
    relations: ClassVar[dict[str, float]] = {}
    cross_entropy: ClassVar[float] = 0.0

    @model_validator(mode="after")
    def _others_are_read(self) -> "GKD":
        if self.own == 1 and self.others != "data":
            raise ValueError(f"others = {self.others} with own = 1: every batch has the student's own answers")
        return self

    def reads(self) -> Any:
        from argosy.train.objectives.distill import FIELDS

        return FIELDS


class ULD(Settings):
    """Universal logit distillation (arXiv:2402.12030): a teacher with another tokenizer reads the same text, and where both tokenize it
    into the same bytes the student's probabilities, sorted, go to the teacher's."""

    teacher: Annotated[str, Also("teacher_model_name_or_path", "teacher_model")]
    """The model to learn from: Hub folder, GGUF file, run directory or checkpoint, with its own tokenizer."""
    cross_entropy: Annotated[float, Also("uld_crossentropy_weight")] = Field(1.0, ge=0)
    """Weight of the cross-entropy of the labels. It is 1 in the paper, 0 in TRL's GOLD."""
    weight: Annotated[float, Also("uld_distillation_weight")] = Field(1.5, gt=0)
    """Weight of the distance of sorted probabilities; 1.5 in the paper."""
    temperature: Annotated[float, Also("uld_student_temperature", "uld_teacher_temperature")] = Field(1.0, gt=0)
    """Both distributions are softmax(logits / temperature)."""
    hybrid: Annotated[bool, Also("uld_use_hybrid_loss")] = False
    """Tokens of the same bytes in both vocabularies are compared as themselves, and only the others sorted. The start of a run says how
    many there are."""
    matched: Annotated[float | None, Also("uld_hybrid_matched_weight", note="uld_hybrid_unmatched_weight is 1 minus it")] = Field(
        None, ge=0, le=1
    )
    """Share of the tokens of both vocabularies in a hybrid distance; the others have the rest. None: their share of the teacher's
    vocabulary, as in TRL's GOLD."""
    beta: float = Field(0.5, ge=0, le=1)
    """How a hybrid distance compares the tokens of both vocabularies: by generalized Jensen-Shannon divergence with this share of the
    teacher in the mixture; 0 is KL(teacher || student), 1 KL(student || teacher)."""
    teacher_sequence: int | None = Field(None, gt=1)
    """Places of a row for the teacher's tokens. None: twice `data.sequence`, at most its context. What is beyond is not learned from
    the teacher, which `aligned` shows."""
    chunk: int = Field(1024, gt=0)
    """Tokens whose distributions are compared at once."""

    rows_per_group: ClassVar[int] = 1
    evaluated: ClassVar[tuple[str, ...]] = ("uld", "aligned")
    logits: ClassVar[str] = "online"
    hidden: ClassVar[str] = "none"
    relations: ClassVar[dict[str, float]] = {}
    divergence: ClassVar[str] = "uld"

    @model_validator(mode="after")
    def _hybrid_reads_them(self) -> "ULD":
        for name in ("matched", "beta"):
            if not self.hybrid and name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name):g} with hybrid = false: objective.hybrid=true reads it")
        return self

    def reads(self) -> Any:
        from argosy.train.objectives.uld import FIELDS

        return FIELDS

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.uld import loss

        return loss(self, models, batch)


class GOLD(ULD):
    """On-policy distillation across tokenizers, after TRL's GOLD (general online logit distillation): the student answers prompts, a
    teacher with another tokenizer reads the answers as text, and where both tokenize them into the same bytes the student's
    probabilities, sorted, go to the teacher's. A share of the batches may have the data's answers instead."""

    own: Annotated[float, Also("lmbda", "lambda")] = Field(0.5, ge=0, le=1)
    """Share of the batches whose answers are the student's own, sampled with its weights of the moment. The others have the data's.
    Which batch is which follows from the seed. 1 learns from its own answers alone, and needs prompts only."""
    others: Literal["data", "teacher"] = "data"
    """Where the other answers come from. data: they are in the data. A teacher's answers are not built across tokenizers."""
    sampling: float = Field(1.0, gt=0)
    """Temperature at which answers are sampled; `temperature` is that of the distance."""
    template: Literal["teacher", "student"] = "teacher"
    """How the teacher is asked where prompts are conversations. teacher: by its own chat template; student: it reads the text that the
    student's template makes, where special tokens become its own of that role, or their names."""
    cross_entropy: Annotated[float, Also("uld_crossentropy_weight")] = Field(0.0, ge=0)
    """Weight of the cross-entropy of the labels where answers are the data's. It is 0 in TRL's GOLD, whose applies to all answers."""
    weight: Annotated[float, Also("uld_distillation_weight")] = Field(1.0, gt=0)
    """Weight of the distance of sorted probabilities; 1 in TRL's GOLD."""

    on_policy: ClassVar[bool] = True
    rewarded: ClassVar[bool] = False

    @model_validator(mode="after")
    def _others_are_given(self) -> "GOLD":
        if self.others == "teacher":
            raise ValueError(
                "others = teacher is not built across tokenizers: others=data, or have the teacher answer the prompts into a file "
                "(`argosy run-batch`) and learn from that"
            )
        if self.own == 1 and "cross_entropy" in self.model_fields_set and self.cross_entropy:
            raise ValueError(f"cross_entropy = {self.cross_entropy:g} with own = 1: no answer is the data's, which alone have labels")
        return self

    def reads(self) -> Any:
        from argosy.train.objectives.uld import FIELDS, OF_ANSWERS

        return {**FIELDS, **OF_ANSWERS}
