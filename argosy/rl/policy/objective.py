"""The loss of a policy over packed completions, and the log-probabilities that it compares.

A row of a batch holds several prompts with their completions, packed as in fine-tuning. Arrays of completion tokens have the shape
[S L]: S completions of at most L tokens, in any order. `places` maps each token to its index among the targets of the flattened rows.
So packing, padding and the order of completions change no result of `rl.algorithms`.

    tokens, targets, segments  [B T]  as in language modeling
    prefixes, positions        [B T]  with shared prompts: the segment of the token's prompt, and the token's position (`Branched`)
    places                     [S L]  the token's index among the B T targets; 0 for padding
    ends                       [S]    the index of the completion's last token among the B T inputs
    live                       [S L]  1 for tokens of the policy, 0 for tokens of an environment and padding
    advantages                 [S L]  advantage of each token
    sampler                    [S L]  log-probability by the engine when it sampled the token; NaN: unknown
    old                        [S L]  log-probability by the trainer before the first of several updates with this rollout
    reference                  [S L]  log-probability by the reference, if the loss has a KL penalty
    values, returns            [S L]  with a critic: the critic's value before the first update, and the return that it learns

The critic `model.critic` is a separate model with a head of one score. Its value at a token is the return that it expects before the
token is chosen. So the value has the same index as the policy's log-probability of the token.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field, Fields
from argosy.models.parts.attention.attend import Attend, Branched, Packed
from argosy.models.parts.stack import Aux
from argosy.ops.precision import wide
from argosy.rl.algorithms import LOSSES
from argosy.rl.policy.calls import call_with
from argosy.rl.policy.correction import correction
from argosy.rl.policy.entropy import entropy_bonus, entropy_of
from argosy.rl.policy.kl import kl_loss
from argosy.rl.policy.metrics import Metrics, mean_where
from argosy.rl.policy.token_losses import ConstantLength, SequenceMean, TokenLoss, TokenMean, ratio_metrics
from argosy.rl.policy.value import value_loss
from argosy.rl.rollouts.packing import PartShape
from argosy.train.objectives.loss import Loss, Models
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.tokens import losses

if TYPE_CHECKING:
    from argosy.rl.policy.settings import Policy

ROWS: Fields = {
    "tokens": Field("B T", np.int32),
    "targets": Field("B T", np.int32),
    "segments": Field("B T", np.int32),
}
SHARED: Fields = {"prefixes": Field("B T", np.int32), "positions": Field("B T", np.int32)}
OF_ANSWERS = Field("S L", np.float32)
PLACES = Field("S L", np.int32)

Answers = Float[Array, "S L"]


def shared_of(shape: PartShape) -> Fields:
    """Returns the fields of a batch that shared prompts add, by name. There are none if prompts are not shared."""
    return SHARED if shape.shared else {}


def fields_of(settings: "Policy") -> Fields:
    """Returns the fields of a batch under these settings, by name, without those of `shared_of`.

    `old` is always among them. With one update per rollout it is NaN, and the loss uses the current policy's log-probabilities instead.
    """
    answers = ["live", "advantages", "sampler", "old", *(["reference"] if settings.kl and settings.kl_in == "loss" else [])]
    answers += ["values", "returns"] if settings.critic is not None else []
    return {**ROWS, "places": PLACES, **dict.fromkeys(answers, OF_ANSWERS)}


def attend_of(batch: dict[str, Array]) -> Attend:
    """Returns the attention mask of the rows of a micro-batch."""
    if "prefixes" in batch:
        return Branched(batch["segments"], batch["prefixes"], batch["positions"])
    return Packed(batch["segments"])


def logps_of(settings: "Policy", model: Any, batch: dict[str, Array]) -> tuple[Answers, Float[Array, "B T D"], Aux]:
    """Computes the log-probability of each completion token at the policy's temperature, the last hidden states, and the aux outputs of
    the layers. Positions outside completions hold the value at index 0, and nothing reads them.
    """
    x, _, aux = model.hidden(batch["tokens"], attend_of(batch))
    nll, _ = losses(settings, model, x, batch["targets"], temperature=settings.temperature)
    return values_at(-nll, batch["places"]), x, aux


def critic_values(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B T"], Aux]:
    """Computes the critic's value at each token of the rows, which is the return that it expects after the token; and the aux outputs
    of its layers."""
    critic = model.critic
    critic.dtype = model.dtype
    x, _, aux = critic.hidden(batch["tokens"], attend_of(batch))
    return critic.unembed(x)[..., 0], aux


def values_at(values: Float[Array, "B T"], places: Int[Array, "S L"]) -> Answers:
    """Gathers values of rows by completion: the values at these indices of the flattened rows."""
    return values.reshape(-1)[places]


def entropies(settings: "Policy", model: Any, x: Float[Array, "B T D"], places: Int[Array, "S L"]) -> Answers:
    """Computes the entropy of the distribution at each completion token, in nats. The logits of only `settings.chunk` tokens exist at
    once. They are recomputed in the backward pass.

    Args:
        x: the last hidden states.
        places: the index of each completion token in the flattened rows.
    """
    flat = x.reshape(-1, x.shape[-1])[places.reshape(-1)]
    rows = min(settings.chunk, len(flat))
    pad = -len(flat) % rows
    parts = jnp.pad(flat, ((0, pad), (0, 0))).reshape(-1, rows, x.shape[-1])
    entropy_of_part = jax.checkpoint(lambda part: entropy_of(wide(model.unembed(part[:, None])[:, 0]) / settings.temperature))
    return jax.lax.map(entropy_of_part, parts).reshape(-1)[: len(flat)].reshape(places.shape)


def token_losses(policy: "Policy", new: Answers, old: Answers, advantages: Answers, live: Answers) -> TokenLoss:
    """Computes the loss of each token with the function that the policy's setting `loss` names."""
    bounds = {"low": policy.low, "high": policy.high, "dual": policy.dual}
    loss = call_with(LOSSES[policy.loss], new=new, old=old, advantages=advantages, mask=live, **bounds)
    return loss if loss.metrics else TokenLoss(loss.tokens, ratio_metrics(jnp.where(live > 0, new - old, 0.0), live))


def policy_loss(settings: "Policy", models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the loss of one micro-batch of a rollout."""
    model = models["model"]
    new, x, aux = logps_of(settings, model, batch)
    live, places = batch["live"], batch["places"]
    old = jnp.where(jnp.isnan(batch["old"]), jax.lax.stop_gradient(new), batch["old"])
    loss = token_losses(settings, new, old, batch["advantages"], live)
    tokens, metrics = loss.tokens, dict(loss.metrics)
    if settings.kl and settings.kl_in == "loss":
        penalty = kl_loss(new, batch["reference"], live, coefficient=settings.kl, estimator=settings.kl_estimator, old=old)
        tokens, metrics = tokens + penalty.tokens, metrics | penalty.metrics
    if settings.entropy:
        bonus = entropy_bonus(entropies(settings, model, x, places), live, settings.entropy)
        tokens, metrics = tokens + bonus.tokens, metrics | bonus.metrics
    # The mean of -log p over tokens that the engine drew estimates the entropy, and costs nothing.
    metrics["nll"] = mean_where(-jax.lax.stop_gradient(new), live)
    tokens, apart = off_policy_correction(settings, tokens, old, batch["sampler"], live)
    if settings.critic is not None:
        values, _ = critic_values(model, batch)
        error = value_loss(values_at(values, places), batch["values"], batch["returns"], live, clip=settings.critic.clip)
        tokens, metrics = tokens + settings.critic.weight * error.tokens, metrics | error.metrics
    by: Any = {"tokens": TokenMean(), "answers": SequenceMean(), "sums": ConstantLength(live.shape[1])}[settings.average]
    mean = by(tokens, live)
    all_metrics: Any = metrics | apart
    return with_routers(Loss(mean, all_metrics), model, aux, router_rows(mean.weight, batch["segments"]))


def off_policy_correction(
    settings: "Policy", tokens: Answers, old: Answers, sampler: Answers, live: Answers
) -> tuple[Answers, Metrics]:
    """Multiplies token losses by their importance weights, unless the settings turn this off. Also returns metrics of the difference
    between sampler and trainer."""
    by = settings.correction
    bounds = {"lowest": by.lowest, "highest": by.highest}
    outside = "truncate" if by.outside == "off" else by.outside
    importance = correction(old, sampler, live, level=by.level, outside=outside, **bounds)
    return (tokens if by.outside == "off" else tokens * importance.weights), importance.metrics


def router_rows(weight: Float[Array, ""], segments: Int[Array, "B T"]) -> Float[Array, "B"]:
    """Computes the weight of each row in the aux losses of experts. It is the row's share of the micro-batch's tokens, times the weight
    of the micro-batch's loss.
    """
    row_tokens = jnp.sum((segments > 0).astype(jnp.float32), 1)
    return weight * row_tokens / jnp.maximum(jnp.sum(row_tokens), 1.0)
