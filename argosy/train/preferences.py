"""The settings of objectives that learn from comparisons and labels of whole answers, without jax: DPO and relatives, KTO, reward
models. Each is also the objective's function.

Their data are sequences of a prompt and a completion, of which only the completion counts (`data.chat.conversations`). A preference
pair is two rows of a batch, which are never split.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings
from argosy.train.settings import OfTokens

# Loss types of DPO that read `label_smoothing`.
SMOOTHED = ("conservative", "robust")
DPO_LOSSES = ("sigmoid", "sigmoid_norm", *SMOOTHED, "ipo", "hinge", "apo_zero", "apo_down", "sft")


def fields(*named: str) -> Any:
    """The arrays of a batch of sequences, with these numbers of each sequence."""
    from argosy.train.objectives.sequences import FIELDS, PER_SEQUENCE

    return {**FIELDS, **dict.fromkeys(named, PER_SEQUENCE)}


class Referenced(OfTokens):
    """An objective that compares the model with a frozen reference: the model as it was before the first step."""

    reference: Annotated[
        Literal["cached", "online"], Also("precompute_ref_log_probs", note="`reference=cached`, the default, does that")
    ] = "cached"
    """Where the reference's log-probabilities come from. cached: computed once before the first step, for every sequence, and kept
    on disk; a step then saves the reference's pass, a quarter of its FLOPs, and no second model is in memory. online: computed in
    every step by a frozen copy of the first weights. Both give the same numbers to rounding, because the reference never changes and
    rows are not augmented."""

    def reads(self) -> Any:
        return fields(*(("reference",) if self.reference == "cached" else ()))


class DPO(Referenced):
    """Direct preference optimization (arXiv:2305.18290) and its variants, alone or mixed (`train.objectives.dpo`)."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference: rewards are beta times the log-ratio of model and reference. The paper uses 0.1, and 0.5
    for summarization; of `ipo` it is the regularization tau."""
    losses: Annotated[
        dict[str, float], Also("loss_type", "loss_weights", "dpo_loss", "pref_loss", note="objective.losses.ipo=1 is the loss `ipo`")
    ] = Field(default_factory=dict)
    """Loss types with their weights, which are summed; none: sigmoid alone. They are sigmoid (the paper's), sigmoid_norm
    (log-ratios divided by the number of tokens), conservative and robust (labels that are wrong with probability
    `label_smoothing`), ipo, hinge, apo_zero, apo_down, and sft (cross-entropy of the chosen answer, which keeps its
    log-probability up). `objective.losses.sigmoid=1 objective.losses.sft=0.2` is a mixture."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are swapped by mistake. Read by the losses conservative and robust."""

    rows_per_group: ClassVar[int] = 2
    trains_on: ClassVar[tuple[str, ...]] = ("preference",)

    @property
    def mixture(self) -> dict[str, float]:
        """The weight of each loss."""
        return self.losses or {"sigmoid": 1.0}

    @model_validator(mode="after")
    def _losses_exist(self) -> "DPO":
        for name, weight in self.losses.items():
            if name not in DPO_LOSSES:
                raise ValueError(f"losses.{name}: a loss is one of {', '.join(DPO_LOSSES)}")
            if weight <= 0:
                raise ValueError(f"losses.{name} = {weight}: a weight is above 0")
        smoothed = [name for name in SMOOTHED if name in self.losses]
        if bool(smoothed) != bool(self.label_smoothing):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing:g} with the loss {' and '.join(self.mixture)}: only conservative and "
                "robust read it, and without it they are the loss sigmoid"
            )
        return self

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.dpo import loss

        return loss(self, models, batch)


class OfPairs(OfTokens):
    """An objective over pairs alone, without a reference."""

    rows_per_group: ClassVar[int] = 2
    trains_on: ClassVar[tuple[str, ...]] = ("preference",)

    def reads(self) -> Any:
        return fields()


class SimPO(OfPairs):
    """Simple preference optimization without a reference (arXiv:2405.14734; `train.objectives.simpo`)."""

    beta: float = Field(2.0, gt=0)
    """Scale of the reward, which is the mean log-probability of an answer's tokens; the paper uses 2 to 2.5, and 10 for some models."""
    gamma: Annotated[float, Also("simpo_gamma", "gamma_beta_ratio", note="gamma is the paper's: the ratio times beta")] = Field(
        1.0, ge=0
    )
    """Target reward margin between chosen and rejected; the paper finds gamma / beta of 0.3 to 0.5 best in most settings."""

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.simpo import loss

        return loss(self, models, batch)


class CPO(OfPairs):
    """Contrastive preference optimization (arXiv:2401.08417; `train.objectives.cpo`)."""

    beta: float = Field(0.1, gt=0)
    """Scale of the difference of log-probabilities; the paper uses 0.1."""
    sft: Annotated[float, Also("cpo_alpha")] = Field(1.0, ge=0)
    """Weight of the cross-entropy of the chosen answer, which takes the place of a reference; 1 in the paper."""

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.cpo import loss

        return loss(self, models, batch)


class ORPO(OfPairs):
    """Odds ratio preference optimization: fine-tuning and preferences in one (arXiv:2403.07691; `train.objectives.orpo`)."""

    beta: Annotated[float, Also("orpo_alpha")] = Field(0.1, gt=0)
    """Weight of the odds-ratio term beside the cross-entropy, lambda in the paper, which uses 0.1 for Mistral and 0.2 for Llama 2."""

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.orpo import loss

        return loss(self, models, batch)


class KTO(Referenced):
    """Kahneman-Tversky optimization, from answers that are labeled good or bad (arXiv:2402.01306; `train.objectives.kto`)."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference, as in DPO; the paper uses 0.1."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of answers labeled good. The paper advises desirable_weight x good to undesirable_weight x bad between 1 and 4/3 to 1,
    counted in examples; 1 and 1 for balanced labels."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of answers labeled bad."""

    # An example, and its prompt with the answer to another one, for the estimate of the KL divergence.
    rows_per_group: ClassVar[int] = 2
    trains_on: ClassVar[tuple[str, ...]] = ("kto",)
    # A batch of one example has no estimate worth the name.
    least_groups: ClassVar[int] = 2

    def reads(self) -> Any:
        return fields("desirable", *(("reference",) if self.reference == "cached" else ()))

    def before(self, models: Any, batch: Any, key: Any) -> Any:
        """The divergence of the model from the reference, which every example of a batch shares."""
        from argosy.train.objectives.kto import divergence

        return divergence(self, models, batch)

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.kto import loss

        return loss(self, models, batch)


class RewardModel(Settings):
    """A reward model by the Bradley-Terry likelihood of preferences (`train.objectives.reward`). Its head gives one score."""

    center: Annotated[float, Also("center_rewards_coefficient")] = Field(0.01, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near 0: preferences fix only their difference.
    arXiv:2312.09244 uses 0.01. 0: off."""

    rows_per_group: ClassVar[int] = 2
    trains_on: ClassVar[tuple[str, ...]] = ("preference",)
    # Scores that the model's head must give for each token, in place of logits.
    scores: ClassVar[int] = 1

    def reads(self) -> Any:
        return fields("margin")

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.reward import loss

        return loss(self, models, batch)


class ProcessReward(Settings):
    """A process reward model: whether each step of an answer is right (arXiv:2305.20050; `train.objectives.process_reward`)."""

    rows_per_group: ClassVar[int] = 1
    trains_on: ClassVar[tuple[str, ...]] = ("stepwise",)
    scores: ClassVar[int] = 1

    def reads(self) -> Any:
        from argosy.train.objectives.sequences import PER_TOKEN

        return fields() | {"right": PER_TOKEN}

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.process_reward import loss

        return loss(self, models, batch)
