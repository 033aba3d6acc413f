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

Differences from the papers: `ipo` divides by the number of tokens, as its authors confirmed to TRL, because squared sums grow with
length.
Differences from TRL 1.16: `sft` is the mean over each answer's tokens, then over pairs; TRL takes the mean over all tokens of a
micro-batch, which changes with accumulation. A wrong-label probability belongs to the losses that read it; TRL's `sigmoid` once
read it silently. The end-of-sequence token counts in both.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import (
    Pairs,
    SequenceLogps,
    pair_weights,
    pairs,
    preference_metrics,
    referenced,
    sequences,
)
from argosy.train.preferences import DPO

Each = Float[Array, "P s"]


class LogRatios(NamedTuple):
    """Pairs, with the log-ratios of both answers. chosen_mean, rejected_mean: divided by the number of tokens."""

    pairs: Pairs
    chosen: Each
    rejected: Each

    @property
    def apart(self) -> Each:
        return self.chosen - self.rejected

    @property
    def apart_by_token(self) -> Each:
        chosen, rejected = self.pairs.chosen, self.pairs.rejected
        return self.chosen / jnp.maximum(chosen.lengths, 1.0) - self.rejected / jnp.maximum(rejected.lengths, 1.0)


def log_sigmoid(x: Each) -> Each:
    return jax.nn.log_sigmoid(x)


def sigmoid(of: LogRatios, how: DPO) -> Each:
    return -log_sigmoid(how.beta * of.apart)


def sigmoid_norm(of: LogRatios, how: DPO) -> Each:
    return -log_sigmoid(how.beta * of.apart_by_token)


def conservative(of: LogRatios, how: DPO) -> Each:
    logits, wrong = how.beta * of.apart, how.label_smoothing
    return -(1 - wrong) * log_sigmoid(logits) - wrong * log_sigmoid(-logits)


def robust(of: LogRatios, how: DPO) -> Each:
    logits, wrong = how.beta * of.apart, how.label_smoothing
    return (-(1 - wrong) * log_sigmoid(logits) + wrong * log_sigmoid(-logits)) / (1 - 2 * wrong)


def ipo(of: LogRatios, how: DPO) -> Each:
    return (of.apart_by_token - 1 / (2 * how.beta)) ** 2


def hinge(of: LogRatios, how: DPO) -> Each:
    return jax.nn.relu(1 - how.beta * of.apart)


def apo_zero(of: LogRatios, how: DPO) -> Each:
    return 1 - jax.nn.sigmoid(how.beta * of.chosen) + jax.nn.sigmoid(how.beta * of.rejected)


def apo_down(of: LogRatios, how: DPO) -> Each:
    return jax.nn.sigmoid(how.beta * of.chosen) + 1 - jax.nn.sigmoid(how.beta * of.apart)


def sft(of: LogRatios, how: DPO) -> Each:
    return -of.pairs.chosen.means


LOSSES: Mapping[str, Callable[[LogRatios, DPO], Each]] = {
    "sigmoid": sigmoid, "sigmoid_norm": sigmoid_norm, "conservative": conservative, "robust": robust, "ipo": ipo, "hinge": hinge,
    "apo_zero": apo_zero, "apo_down": apo_down, "sft": sft,
}  # fmt: skip


def dpo(how: DPO, found: SequenceLogps, reference: Float[Array, "B s"], live: Float[Array, "B s"]) -> Loss:
    """The loss of a batch from the log-probabilities of its sequences by the model and by the reference."""
    both = pairs(found, live)
    of = LogRatios(both, both.chosen.logps - reference[::2], both.rejected.logps - reference[1::2])
    weights = how.mixture
    each = {name: LOSSES[name](of, how) for name in weights}
    size = how.beta * (jnp.abs(both.chosen.logps) + jnp.abs(both.rejected.logps))
    metrics = preference_metrics(both, how.beta * of.chosen, how.beta * of.rejected, size)
    if len(each) > 1:
        metrics |= {f"loss/{name}": both.mean(values) for name, values in each.items()}
    return Loss(both.mean(sum((weights[name] * values for name, values in each.items()), jnp.zeros(()))), metrics)


def loss(how: DPO, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    model = models["model"]
    found, aux = sequences(how, model, batch)
    made = dpo(how, found, referenced(how, models, batch), batch["live"])
    return with_routers(made, model, aux, pair_weights(batch["live"]))
