"""Reduces values of tokens to values of whole sequences, for objectives over preferences and labels.

A row holds up to s sequences, one in each slot: tokens of segment k belong to slot k - 1. Unpacked rows have one slot. The chosen
sequence of a pair is in an even row, and the rejected one in the same slot of the next row. Sums are taken slot by slot. So packing,
padding and the order of rows do not change the value of a sequence, and the mean of a sequence is divided by its own length.

    tokens, targets, segments, mask   [B T] as in language modeling; the mask is 1 on targets of completions
    live                              [B s] 1 where the slot holds a sequence

The last token of a sequence is also an input, without a target. Reward models read their score there.
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
# The relative difference of float32 sums over hundreds of tokens that are computed in different batches.
TIE = 1e-5
FIELDS: Fields = {
    "tokens": Field("B T", np.int32),
    "targets": Field("B T", np.int32),
    "segments": Field("B T", np.int32),
    "mask": PER_TOKEN,
    "live": PER_SEQUENCE,
}


class SequenceLogps(NamedTuple):
    """The log-probabilities of completions.

    logps: the log-probability of each completion, a sum over its tokens.
    lengths: the number of tokens of each completion.
    tie: the relative rounding error of these sums.
    """

    logps: Float[Array, "B s"]
    lengths: Float[Array, "B s"]
    tie: float = TIE

    @property
    def means(self) -> Float[Array, "B s"]:
        """The mean log-probability of a token; 0 in empty slots."""
        return self.logps / jnp.maximum(self.lengths, 1.0)


class Pairs(NamedTuple):
    """Preference pairs.

    chosen, rejected: the log-probabilities of the chosen and of the rejected completions.
    live: 1 for a pair, 0 for padding.
    """

    chosen: SequenceLogps
    rejected: SequenceLogps
    live: Float[Array, "P s"]

    def mean(self, values: Float[Array, "P s"]) -> WeightedMean:
        """Computes the mean over pairs of a value of each pair."""
        return WeightedMean(jnp.sum(jnp.where(self.live > 0, values, 0.0)), jnp.sum(self.live))


def tie_of(dtype: Any) -> float:
    """Returns the relative rounding error of values of a model that computes in this type: 0.4 % in bfloat16."""
    return max(TIE, float(jnp.finfo(dtype).eps) / 2)


def by_slot(values: Float[Array, "B T"], segments: Int[Array, "B T"], slots: int) -> Float[Array, "B s"]:
    """Sums values over the tokens of each slot."""
    mask = segments[:, :, None] == jnp.arange(1, slots + 1, dtype=segments.dtype)
    return jnp.sum(jnp.where(mask, values[:, :, None], 0.0), 1)


def sequences(settings: TokenObjective, model: Any, batch: dict[str, Array]) -> tuple[SequenceLogps, Aux]:
    """Computes the log-probabilities of a batch's completions under a model, and the aux outputs of its layers. The setting `head`
    decides how many logits exist at once; large logits never exist whole in float32."""
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    nll, _ = losses(settings, model, x, batch["targets"])
    mask, slots = batch["mask"], batch["live"].shape[1]
    summed = by_slot(jnp.where(mask > 0, -nll, 0.0), batch["segments"], slots)
    lengths = by_slot((mask > 0).astype(jnp.float32), batch["segments"], slots)
    return SequenceLogps(summed, lengths, tie_of(x.dtype)), aux


def scores(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B T"], Aux]:
    """Computes the score at each token by a model whose head gives one score, and the aux outputs of its layers."""
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    return model.unembed(x)[..., 0], aux


def last(values: Float[Array, "B T"], segments: Int[Array, "B T"], slots: int) -> Float[Array, "B s"]:
    """Returns the value at the last token of each slot."""
    after = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return by_slot(jnp.where(segments != after, values, 0.0), segments, slots)


def pairs(logps: SequenceLogps, live: Float[Array, "B s"]) -> Pairs:
    """Makes the pairs of a batch, whose even rows hold chosen sequences and odd rows rejected ones."""
    chosen, rejected = (SequenceLogps(logps.logps[i::2], logps.lengths[i::2], logps.tie) for i in (0, 1))
    return Pairs(chosen, rejected, live[::2])


def reference_logps(settings: TokenObjective, models: Models, batch: dict[str, Array]) -> Float[Array, "B s"]:
    """Returns the reference's log-probabilities of a batch's completions, without gradient. They are those of the batch if it holds
    them; otherwise the frozen model computes them."""
    if "reference" in batch:
        return batch["reference"]
    return jax.lax.stop_gradient(sequences(settings, models["reference"], batch)[0].logps)


def pair_weights(live: Float[Array, "B s"]) -> Float[Array, "B"]:
    """Computes the weight of each row in the aux losses of experts. It is half the number of the row's pairs, because a pair has two
    rows.
    """
    return jnp.sum(live, 1) / 2


def pair_loss(
    function: Callable[[Any, SequenceLogps, Float[Array, "B s"]], Loss],
    settings: TokenObjective,
    models: Models,
    batch: dict[str, Array],
) -> Loss:
    """Computes the loss of a batch of pairs, with the aux losses of experts.

    Args:
        function: (settings, log-probabilities of sequences, `live`) -> the loss.
    """
    logps, aux = sequences(settings, models["model"], batch)
    return with_routers(function(settings, logps, batch["live"]), models["model"], aux, pair_weights(batch["live"]))


def preference_accuracy(
    chosen: Float[Array, "*n"], rejected: Float[Array, "*n"], scale: Float[Array, "*n"], tie: float = TIE
) -> Float[Array, "*n"]:
    """Returns 1 where chosen is above rejected, 0 where it is below, and one half where they differ by no more than rounding.

    Before the first update of DPO, both log-ratios are 0 apart from rounding, so which one is larger would be random.

    Args:
        scale: the size of the numbers from which chosen and rejected were computed.
        tie: the relative rounding error of these numbers.
    """
    apart = chosen - rejected
    return jnp.where(jnp.abs(apart) <= tie * scale, 0.5, (apart > 0).astype(apart.dtype))


def preference_metrics(
    pairs: Pairs, chosen: Float[Array, "P s"], rejected: Float[Array, "P s"], scale: Float[Array, "P s"] | None = None
) -> dict[str, WeightedMean]:
    """Computes the metrics that every objective over pairs reports, as means over pairs.

    If `logps/chosen` falls together with `logps/rejected` while the margin rises, DPO has collapsed: answers that nobody wrote become
    likely.

    Args:
        chosen, rejected: the implicit rewards of the answers.
        scale: the size of the numbers from which the rewards were computed, for `preference_accuracy`. The default is the size of the
            rewards.
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
