"""Importance weights for the difference between sampler and trainer. The engine's log-probabilities of the tokens that it sampled are
not exactly those that the trainer computes for them (quantized rollout, other kernels, older weights).

    w = p_trainer / p_sampler                            of a token, or of a sequence as the product over its tokens
    truncate: min(max(w, lowest), highest)               TIS (Yao et al. 2025, with lowest 0 and highest 2)
    mask:     w if lowest <= w <= highest, else 0        IcePop (arXiv:2510.18855)

The loss of each token is multiplied by its weight; tokens of weight 0 still count in the normalization, as in TRL and verl. Weights
have no gradient. p_trainer is the trainer's probability at the start of the step (`old` in the losses).

Sampling by top-k, top-p or min-p changes the sampler's distribution: its log-probabilities must be taken after that truncation, or
every weight is too small by the same factor.

A sampler log-probability of NaN is missing. Its weight is 1, and the metric `sampler/missing` counts it.

Differences from TRL 1.16: the default is one weight per token, truncated at 2, instead of one per sequence, masked at 3. A product over
hundreds of tokens is far from 1 although each factor is near 1. Missing values and the effective sample size are reported.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.rl.policy.metrics import EffectiveShare, Metrics, highest_where, mean_where
from argosy.rl.policy.token_losses import ratios, sequence_mask


class ImportanceWeights(NamedTuple):
    """Importance weights and their metrics.

    weights: factors of the token losses [B T], or of all token losses of a row [B 1]; 1 outside the mask.
    metrics: metrics of the difference between sampler and trainer.
    """

    weights: Float[Array, "B #T"]
    metrics: Metrics


def correction(
    trainer: Float[Array, "B T"],
    sampler: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    level: Literal["token", "sequence"] = "token",
    outside: Literal["truncate", "mask"] = "truncate",
    lowest: float = 0.0,
    highest: float = 2.0,
) -> ImportanceWeights:
    """Computes importance weights, and metrics of the difference between sampler and trainer.

    The metrics are

        sampler/difference_max, _mean    absolute differences of log-probabilities, in nats
        sampler/outside                  share of weights that were truncated or masked
        sampler/missing                  share of tokens without a log-probability of the sampler
        sampler/effective                effective sample size of the weights, as a share of their number

    Args:
        trainer: log-probabilities of the sampled tokens under the trainer's model.
        sampler: log-probabilities of the same tokens as the engine reported them; NaN where they are missing.
        mask: 1 for tokens that the policy sampled.
        level: whether there is one weight per token or per sequence.
        outside: whether weights below `lowest` or above `highest` are moved to the bound (`truncate`) or set to 0 (`mask`).
        lowest, highest: the bounds of the weights.

    Raises:
        BadInput: not 0 <= lowest <= 1 <= highest.
    """
    if not 0 <= lowest <= 1 <= highest:
        raise BadInput(
            f"importance weights between {lowest} and {highest}", hint="1 means no difference, so it lies between, as in 0 and 2"
        )
    trainer, sampler = jax.lax.stop_gradient((trainer, sampler))
    in_mask, there = mask > 0, ~jnp.isnan(sampler)
    both = (in_mask & there).astype(mask.dtype)
    apart = jnp.where(in_mask & there, trainer - sampler, 0.0)
    logs, live = (apart, mask) if level == "token" else (jnp.sum(apart, 1, keepdims=True), sequence_mask(mask))
    raw = ratios(logs)
    beyond = (raw < lowest) | (raw > highest)
    weights = jnp.clip(raw, lowest, highest) if outside == "truncate" else jnp.where(beyond, 0.0, raw)
    weights = jnp.where(live > 0, weights, 1.0)
    counted = jnp.where(live > 0, weights, 0.0)
    metrics: Metrics = {
        "sampler/difference_max": highest_where(jnp.abs(apart), both),
        "sampler/difference_mean": mean_where(jnp.abs(apart), both),
        "sampler/outside": mean_where(beyond.astype(mask.dtype), live),
        "sampler/missing": mean_where((~there).astype(mask.dtype), mask),
        "sampler/effective": EffectiveShare(
            jnp.sum(counted), jnp.sum(counted**2), jnp.sum((live > 0).astype(mask.dtype))
        ),
    }
    return ImportanceWeights(weights, metrics)
