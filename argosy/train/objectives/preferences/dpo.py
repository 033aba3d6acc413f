"""Direct preference optimization (DPO) and its variants, alone or mixed by weight.

With w the chosen and l the rejected answer, r(y) = log p(y) - log p_ref(y) the log-ratio of an answer (the sum over its tokens),
|y| its number of tokens, d = r(w) - r(l) and s the logistic function:

    sigmoid        -log s(beta d)                                    Rafailov et al. 2023, arXiv:2305.18290, equation 7
    sigmoid_norm   -log s(beta (r(w)/|w| - r(l)/|l|))                Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, equation 6
    conservative   -(1-e) log s(beta d) - e log s(-beta d)           Mitchell 2023 (cDPO): the expected loss under wrong labels
    robust         (-(1-e) log s(beta d) + e log s(-beta d)) / (1-2e)
                                                                     Chowdhury et al. 2024 (rDPO), arXiv:2403.00409, equation 7:
                                                                     unbiased under wrong labels, where conservative is not
    ipo            (r(w)/|w| - r(l)/|l| - 1/(2 beta))^2              Azar et al. 2023, arXiv:2310.12036, equation 17
    hinge          max(0, 1 - beta d)                                Zhao et al. 2023 (SLiC), arXiv:2305.10425
    apo_zero       1 - s(beta r(w)) + s(beta r(l))                   D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, equation 7:
                                                                     chosen answers are better than the model's own
    apo_down       s(beta r(w)) + 1 - s(beta d)                      the same, equation 8: chosen answers are worse than those
    sft            -log p(w) / |w|                                   Pang et al. 2024 (RPO), arXiv:2404.19733, equation 2

Difference from the papers: `ipo` divides by the number of tokens, as its authors confirmed to TRL, because squared sums grow with
length.
Differences from TRL 1.16: `sft` is the mean over each answer's tokens, then over pairs; TRL takes the mean over all tokens of a
micro-batch, which changes with accumulation. e, the probability of a wrong label, may only be set for losses that use it; TRL's
`sigmoid` once used it silently. The end-of-sequence token counts in both.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from argosy.core.settings import Also
from argosy.train.objectives.objective import Needs
from argosy.train.objectives.preferences.base import PAIRS, ReferenceObjective

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from argosy.train.objectives.loss import Loss, Models
    from argosy.train.objectives.preferences.sequences import Pairs, SequenceLogps

    Each = Float[Array, "P s"]

# Loss types that read `label_smoothing`.
SMOOTHED = ("conservative", "robust")


class DPO(ReferenceObjective):
    """Direct preference optimization (arXiv:2305.18290) and its variants, alone or mixed."""

    needs: ClassVar[Needs] = PAIRS

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference: rewards are beta times the log-ratio of model and reference. The paper uses 0.1, and 0.5
    for summarization; for `ipo` it is the regularization tau.
    """
    losses: Annotated[
        dict[str, float], Also("loss_type", "loss_weights", "dpo_loss", "pref_loss", note="objective.losses.ipo=1 is the loss `ipo`")
    ] = Field(default_factory=dict)
    """Loss types with their weights, which are summed; empty: sigmoid alone. They are sigmoid (the paper's), sigmoid_norm (log-ratios
    divided by the number of tokens), conservative and robust (labels that are wrong with probability `label_smoothing`), ipo, hinge,
    apo_zero, apo_down, and sft (cross-entropy of the chosen completion, which keeps its log-probability up).
    `objective.losses.sigmoid=1 objective.losses.sft=0.2` is a mixture.
    """
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are swapped by mistake. Used by the losses conservative and robust."""

    @property
    def mixture(self) -> dict[str, float]:
        """The weight of each loss."""
        return self.losses or {"sigmoid": 1.0}

    @model_validator(mode="after")
    def _losses_exist(self) -> "DPO":
        for name, weight in self.losses.items():
            if name not in LOSSES:
                raise ValueError(f"losses.{name}: a loss is one of {', '.join(LOSSES)}")
            if weight <= 0:
                raise ValueError(f"losses.{name} = {weight}: a weight is above 0")
        smoothed = [name for name in SMOOTHED if name in self.losses]
        if bool(smoothed) != bool(self.label_smoothing):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing:g} with the loss {' and '.join(self.mixture)}: only conservative and "
                "robust read it, and without it they are the loss sigmoid"
            )
        return self

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.train.objectives.preferences.sequences import pair_loss, reference_logps

        def of_batch(settings: DPO, logps: "SequenceLogps", live: "Array") -> "Loss":
            return dpo(settings, logps, reference_logps(settings, models, batch), live)

        return pair_loss(of_batch, self, models, batch)


class LogRatios(NamedTuple):
    """The log-ratios of preference pairs.

    pairs: the pairs, with log-probabilities under the model.
    chosen, rejected: the log-ratio of the model to the reference for both completions.
    """

    pairs: "Pairs"
    chosen: "Each"
    rejected: "Each"

    @property
    def margin(self) -> "Each":
        return self.chosen - self.rejected

    @property
    def margin_of_means(self) -> "Each":
        """The margin (chosen minus rejected) of log-ratios that are divided by their numbers of tokens."""
        import jax.numpy as jnp

        chosen, rejected = self.pairs.chosen, self.pairs.rejected
        return self.chosen / jnp.maximum(chosen.lengths, 1.0) - self.rejected / jnp.maximum(rejected.lengths, 1.0)


def _logistic(x: "Each") -> "Each":
    import jax

    return jax.nn.sigmoid(x)


def _log_sigmoid(x: "Each") -> "Each":
    import jax

    return jax.nn.log_sigmoid(x)


def _sigmoid(ratios: LogRatios, settings: DPO) -> "Each":
    return -_log_sigmoid(settings.beta * ratios.margin)


def _sigmoid_norm(ratios: LogRatios, settings: DPO) -> "Each":
    return -_log_sigmoid(settings.beta * ratios.margin_of_means)


def _conservative(ratios: LogRatios, settings: DPO) -> "Each":
    logits, wrong = settings.beta * ratios.margin, settings.label_smoothing
    return -(1 - wrong) * _log_sigmoid(logits) - wrong * _log_sigmoid(-logits)


def _robust(ratios: LogRatios, settings: DPO) -> "Each":
    logits, wrong = settings.beta * ratios.margin, settings.label_smoothing
    return (-(1 - wrong) * _log_sigmoid(logits) + wrong * _log_sigmoid(-logits)) / (1 - 2 * wrong)


def _ipo(ratios: LogRatios, settings: DPO) -> "Each":
    return (ratios.margin_of_means - 1 / (2 * settings.beta)) ** 2


def _hinge(ratios: LogRatios, settings: DPO) -> "Each":
    import jax

    return jax.nn.relu(1 - settings.beta * ratios.margin)


def _apo_zero(ratios: LogRatios, settings: DPO) -> "Each":
    return 1 - _logistic(settings.beta * ratios.chosen) + _logistic(settings.beta * ratios.rejected)


def _apo_down(ratios: LogRatios, settings: DPO) -> "Each":
    return _logistic(settings.beta * ratios.chosen) + 1 - _logistic(settings.beta * ratios.margin)


def _sft(ratios: LogRatios, settings: DPO) -> "Each":
    return -ratios.pairs.chosen.means


LOSSES: "Mapping[str, Callable[[LogRatios, DPO], Each]]" = {
    "sigmoid": _sigmoid, "sigmoid_norm": _sigmoid_norm, "conservative": _conservative, "robust": _robust, "ipo": _ipo, "hinge": _hinge,
    "apo_zero": _apo_zero, "apo_down": _apo_down, "sft": _sft,
}  # fmt: skip


def dpo(settings: DPO, logps: "SequenceLogps", reference: "Float[Array, 'B s']", live: "Float[Array, 'B s']") -> "Loss":
    """Computes the loss of a batch from the log-probabilities of its sequences under the model and under the reference.

    Args:
        live: 1 where a slot holds a sequence.
    """
    import jax.numpy as jnp

    from argosy.train.objectives.loss import Loss
    from argosy.train.objectives.preferences.sequences import pairs, preference_metrics

    both = pairs(logps, live)
    ratios = LogRatios(both, both.chosen.logps - reference[::2], both.rejected.logps - reference[1::2])
    weights = settings.mixture
    each = {name: LOSSES[name](ratios, settings) for name in weights}
    size = settings.beta * (jnp.abs(both.chosen.logps) + jnp.abs(both.rejected.logps))
    metrics = preference_metrics(both, settings.beta * ratios.chosen, settings.beta * ratios.rejected, size)
    if len(each) > 1:
        metrics |= {f"loss/{name}": both.mean(values) for name, values in each.items()}
    return Loss(both.mean(sum((weights[name] * values for name, values in each.items()), jnp.zeros(()))), metrics)
