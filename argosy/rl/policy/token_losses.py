"""Shared parts of policy losses. A loss returns a value for every token; its normalization is a separate choice.

    token_loss = ppo(new, old, advantages, mask)
    loss = TokenMean()(token_loss.tokens, mask)            # a WeightedMean: the sum and its weight

Token losses may be added (the KL penalty, the entropy bonus) and multiplied by importance weights (`argosy.rl.policy.correction`)
before they are normalized. Sums and weights are added over micro-batches, so accumulation and the number of devices do not change the
loss. A mean of means over micro-batches, as in TRL's GRPO, would weigh tokens by the micro-batch they fall into.

Ratios are exp(new - old), at most e^20: a greater one could overflow, and its gradient would be NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.rl.policy.metrics import Lowest, Metrics, highest_where, mean_where
from argosy.train.objectives.loss import WeightedMean

LARGEST_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """The loss of each token.

    tokens: the loss of each token; 0 outside the mask.
    metrics: metrics of the loss.
    """

    tokens: Float[Array, "B T"]
    metrics: Metrics


@dataclass(frozen=True)
class TokenMean:
    """Every token of the batch weighs the same (DAPO, arXiv:2503.14476). Long answers weigh more than short ones."""

    def __call__(self, tokens: Float[Array, "B T"], mask: Float[Array, "B T"]) -> WeightedMean:
        return mean_where(tokens, mask)


@dataclass(frozen=True)
class SequenceMean:
    """Every completion weighs the same, and each of its tokens 1 / length (GRPO, GSPO). So a long wrong completion is punished less per
    token than a short one.

    Rows without tokens have weight 0; TRL counts them as completions.
    """

    def __call__(self, tokens: Float[Array, "B T"], mask: Float[Array, "B T"]) -> WeightedMean:
        return mean_where(sequence_means(tokens, mask), sequence_mask(mask))


@dataclass(frozen=True)
class ConstantLength:
    """The sum over a completion's tokens is divided by a constant, then averaged over completions (Dr. GRPO, arXiv:2503.20783). So the
    length of a completion causes no bias.

    length: the constant divisor in tokens, usually the largest length of a completion. It only scales the loss, so it must not change
        from batch to batch. verl divides by the padded width, which does.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise BadInput(f"a loss divided by {self.length} tokens", hint="give the longest answer allowed")

    def __call__(self, tokens: Float[Array, "B T"], mask: Float[Array, "B T"]) -> WeightedMean:
        summed = jnp.sum(jnp.where(mask > 0, tokens, 0.0), 1, keepdims=True)
        return mean_where(summed / self.length, sequence_mask(mask))


Normalization = TokenMean | SequenceMean | ConstantLength


def sequence_mask(mask: Float[Array, "B T"]) -> Float[Array, "B 1"]:
    """Returns 1 for each row that has tokens, 0 for others."""
    return jnp.any(mask > 0, 1, keepdims=True).astype(mask.dtype)


def sequence_means(values: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, "B 1"]:
    """Computes the mean over the tokens of each row; 0 for rows without tokens."""
    count = jnp.sum((mask > 0).astype(values.dtype), 1, keepdims=True)
    return jnp.sum(jnp.where(mask > 0, values, 0.0), 1, keepdims=True) / jnp.maximum(count, 1.0)


def log_ratios(new: Float[Array, "B T"], old: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes log(p_new / p_old) of each token. It is 0 outside the mask, so inputs there reach neither the loss nor the gradient."""
    return jnp.where(mask > 0, new - old, 0.0)


def ratios(logs: Float[Array, "B #T"]) -> Float[Array, "B #T"]:
    return jnp.exp(jnp.minimum(logs, LARGEST_LOG_RATIO))


def clipped_objective(
    ratio: Float[Array, "B #T"], advantages: Float[Array, "B #T"], low: float, high: float, dual: float | None = None
) -> Float[Array, "B #T"]:
    """Computes -min(ratio A, clip(ratio, 1 - low, 1 + high) A), which is at most -dual A where A < 0. A is the advantage.

    Raises:
        BadInput: a bound clips every ratio or none.
    """
    if not (0 <= low <= 1 and high >= 0):
        raise BadInput(
            f"a ratio clipped between 1 - {low} and 1 + {high}", hint="low is 0 to 1 and high at least 0, such as 0.2 and 0.28"
        )
    if dual is not None and dual <= 1:
        raise BadInput(f"a dual clip at {dual}", hint="it bounds ratios of bad tokens from above, so it is greater than 1, such as 3")
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return loss if dual is None else jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)


def ratio_metrics(logs: Float[Array, "B #T"], mask: Float[Array, "B #T"]) -> Metrics:
    """Metrics of ratios: their mean and extremes where the mask is 1, and the KL divergence of the old policy from the new one by k3.

    Args:
        logs: the logarithm of each ratio.
    """
    logs = jax.lax.stop_gradient(logs)
    ratio = ratios(logs)
    return {
        "ratio/mean": mean_where(ratio, mask),
        "ratio/max": highest_where(ratio, mask),
        "ratio/min": Lowest(highest_where(ratios(-jnp.minimum(logs, LARGEST_LOG_RATIO)), mask).highest),
        "kl/old": mean_where(ratio - 1 - logs, mask),
    }


def clip_metrics(
    ratio: Float[Array, "B #T"],
    advantages: Float[Array, "B #T"],
    mask: Float[Array, "B #T"],
    low: float,
    high: float,
    dual: float | None = None,
) -> Metrics:
    """Metrics of clipping: the shares of ratios that lost their gradient, because they are below 1 - low where A < 0, above 1 + high
    where A > 0, or above dual where A < 0. A is the advantage."""
    share = lambda where: mean_where(jnp.broadcast_to(where, mask.shape).astype(mask.dtype), mask)  # noqa: E731
    shares: Metrics = {
        "clip/low": share((ratio < 1 - low) & (advantages < 0)),
        "clip/high": share((ratio > 1 + high) & (advantages > 0)),
    }
    return shares if dual is None else shares | {"clip/dual": share((ratio > dual) & (advantages < 0))}
