"""Numbers of whole sequences from numbers of their tokens: what objectives over preferences and labels share.

A row holds up to s sequences, one in each slot: tokens of segment k belong to slot k - 1. Unpacked rows have one slot. The
chosen sequence of a pair is in an even row, and the rejected one in the same slot of the row after it. Sums are taken slot by slot, so
packing, padding and the order of rows change no sequence's number, and a sequence's mean divides by its own length.

    tokens, targets, segments, mask   [B T] as in language modeling; the mask is 1 on targets of completions
    live                              [B s] 1 where the slot holds a sequence

The last token of a sequence is an input too, without a target: reward models read their score there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field, Fields
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Aux
from argosy.train.objectives.loss import Loss, Models, WeightedMean
from argosy.train.objectives.objective import TokenObjective
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.tokens import losses

PER_SEQUENCE = Field("B s", np.float32, "row")
PER_TOKEN = Field("B T", np.float32)
# Sums over hundreds of tokens differ by this share of their size in float32 when they are computed in other batches.
TIE = 1e-5
FIELDS: Fields = {
    "tokens": Field("B T", np.int32),
    "targets": Field("B T", np.int32),
    "segments": Field("B T", np.int32),
    "mask": PER_TOKEN,
    "live": PER_SEQUENCE,
}


class SequenceLogps(NamedTuple):
    """Log-probabilities of completions.

    logps: sums over the tokens of each.
    lengths: how many tokens these are.
    tie: the share of its size by which rounding may move a sum.
    """

    logps: Float[Array, "B s"]
    lengths: Float[Array, "B s"]
    tie: float = TIE

    @property
    def means(self) -> Float[Array, "B s"]:
        """The mean log-probability of a token; 0 in empty slots."""
        return self.logps / jnp.maximum(self.lengths, 1.0)


class Pairs(NamedTuple):
    """Chosen and rejected sequences.

    chosen, rejected: their log-probabilities.
    live: 1 for a pair, 0 for padding.
    """

    chosen: SequenceLogps
    rejected: SequenceLogps
    live: Float[Array, "P s"]

    def mean(self, values: Float[Array, "P s"]) -> WeightedMean:
        """The mean of a number of each pair."""
        return WeightedMean(jnp.sum(jnp.where(self.live > 0, values, 0.0)), jnp.sum(self.live))


def tie_of(dtype: Any) -> float:
    """The share of their size by which rounding may move numbers of a model that computes in this type: in bfloat16 its unit of
    rounding, 0.4 %."""
    return max(TIE, float(jnp.finfo(dtype).eps) / 2)


def by_slot(values: Float[Array, "B T"], segments: Int[Array, "B T"], slots: int) -> Float[Array, "B s"]:
    """Sums over the tokens of each slot."""
    mask = segments[:, :, None] == jnp.arange(1, slots + 1, dtype=segments.dtype)
    return jnp.sum(jnp.where(mask, values[:, :, None], 0.0), 1)


def sequences(settings: TokenObjective, model: Any, batch: dict[str, Array]) -> tuple[SequenceLogps, Aux]:
    """The log-probabilities of a batch's completions under a model, and the aux outputs of its layers. Logits exist as the setting
    `head` says, never whole in float32 where they would be large."""
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    nll, _ = losses(settings, model, x, batch["targets"])
    mask, slots = batch["mask"], batch["live"].shape[1]
    summed = by_slot(jnp.where(mask > 0, -nll, 0.0), batch["segments"], slots)
    lengths = by_slot((mask > 0).astype(jnp.float32), batch["segments"], slots)
    return SequenceLogps(summed, lengths, tie_of(x.dtype)), aux


def scores(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B T"], Aux]:
    """The score of each token by a model whose head gives one."""
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    return model.unembed(x)[..., 0], aux


def last(values: Float[Array, "B T"], segments: Int[Array, "B T"], slots: int) -> Float[Array, "B s"]:
    """The value at the last token of each slot."""
    after = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return by_slot(jnp.where(segments != after, values, 0.0), segments, slots)


def pairs(logps: SequenceLogps, live: Float[Array, "B s"]) -> Pairs:
    """The pairs of a batch: even rows hold chosen sequences, odd ones rejected ones."""
    chosen, rejected = (SequenceLogps(logps.logps[i::2], logps.lengths[i::2], logps.tie) for i in (0, 1))
    return Pairs(chosen, rejected, live[::2])


def reference_logps(settings: TokenObjective, models: Models, batch: dict[str, Array]) -> Float[Array, "B s"]:
    """The reference's log-probabilities of the same completions, without gradient: from the batch, or by the frozen model."""
    if "reference" in batch:
        return batch["reference"]
    return jax.lax.stop_gradient(sequences(settings, models["reference"], batch)[0].logps)


def pair_weights(live: Float[Array, "B s"]) -> Float[Array, "B"]:
    """The weight of each row for aux losses of experts: half of its pairs, so that the rows of a batch weigh as much as its pairs."""
    return jnp.sum(live, 1) / 2


def pair_loss(
    function: Callable[[Any, SequenceLogps, Float[Array, "B s"]], Loss],
    settings: TokenObjective,
    models: Models,
    batch: dict[str, Array],
) -> Loss:
    """The loss of a batch of pairs by a function of its sequences' log-probabilities, with the aux losses of experts."""
    logps, aux = sequences(settings, models["model"], batch)
    return with_routers(function(settings, logps, batch["live"]), models["model"], aux, pair_weights(batch["live"]))


def preference_accuracy(
    chosen: Float[Array, "*n"], rejected: Float[Array, "*n"], scale: Float[Array, "*n"], tie: float = TIE
) -> Float[Array, "*n"]:
    """1 where chosen is above rejected, 0 where it is below, one half where they differ by no more than rounding.

    Before the first update of DPO both log-ratios are 0 but for rounding, and which is above is a coin's throw.

    Args:
        scale: the size of the numbers whose rounding may tell them apart.
        tie: the share of it that is rounding.
    """
    apart = chosen - rejected
    return jnp.where(jnp.abs(apart) <= tie * scale, 0.5, (apart > 0).astype(apart.dtype))


def preference_metrics(
    pairs: Pairs, chosen: Float[Array, "P s"], rejected: Float[Array, "P s"], scale: Float[Array, "P s"] | None = None
) -> dict[str, WeightedMean]:
    """What every objective over pairs reports, as means over pairs.

    `logps/chosen` falling together with `logps/rejected` while the margin rises is the collapse of DPO: answers that nobody wrote
    become likely.

    Args:
        chosen, rejected: the implicit rewards of the answers.
        scale: the size of the numbers that they were computed from, for ties (`preference_accuracy`); by default their own.
    """
    scale = jnp.abs(chosen) + jnp.abs(rejected) if scale is None else scale
    return {
        "rewards/chosen": pairs.mean(chosen),
        "rewards/rejected": pairs.mean(rejected),
        "rewards/accuracy": pairs.mean(preference_accuracy(chosen, rejected, scale, pairs.chosen.tie)),
        "rewards/margin": pairs.mean(chosen - rejected),
        "logps/chosen": pairs.mean(pairs.chosen.logps),
        "logps/rejected": pairs.mean(pairs.rejected.logps),
    }
