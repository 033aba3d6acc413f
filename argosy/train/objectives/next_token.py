"""Next-token prediction: cross-entropy over the targets, weighted by the batch's mask."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field as BatchField
from argosy.data.batch import Fields
from argosy.models.parts.attend import Packed
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.inputs import batch_inputs
from argosy.ops.cross_entropy import by_times, from_logits, row_chunks, vocabulary_blocks
from argosy.parallel.scope import axis_sizes, platform, splits
from argosy.train.objectives import Loss, Models, WeightedMean
from argosy.train.objectives.routers import with_routers
from argosy.train.settings import NextToken, OfTokens

Losses = tuple[Float[Array, "B T"], Float[Array, "B T"]]
# Float32 logits of up to this size per device are kept in memory.
ROOMY_BYTES = 2 << 30
FIELDS: Fields = {
    "tokens": BatchField("B T", np.int32),
    "targets": BatchField("B T", np.int32),
    "segments": BatchField("B T", np.int32),
    "mask": BatchField("B T", np.float32),
}


def loss(how: NextToken, models: Models, batch: dict[str, Array], key: Array) -> Loss:
    """Computes the objective."""
    model = models["model"]
    x, _, aux = model.hidden(batch_inputs(batch), Packed(batch["segments"]))
    nll, lse = losses(how, model, x, batch["targets"])
    mask = batch["mask"]
    weight = jnp.sum(mask)
    cross_entropy, z = jnp.sum(nll * mask), jnp.sum(lse * lse * mask)
    metrics = {"cross_entropy": WeightedMean(cross_entropy, weight)}
    if how.z_loss:
        metrics["z_loss"] = WeightedMean(how.z_loss * z, weight)
    total = cross_entropy + how.z_loss * z
    depths = getattr(model.config, "mtp", 0) if how.mtp else 0
    if depths:
        ahead, aux_ahead = further(how, model, x, batch, depths)
        metrics["mtp_cross_entropy"], aux = ahead, aux | {"mtp": aux_ahead}
        total = total + how.mtp / depths * ahead.total
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(batch["mask"], 1))


def further(
    how: NextToken, model: Any, x: Array, batch: dict[str, Array], depths: int
) -> tuple[WeightedMean, dict[str, Array]]:
    """Cross-entropy of the tokens after the next one (multi-token prediction), over all depths, and the aux outputs of their
    layers, [depths ...].

    Args:
        x: the input of the model's head [B T D].
    """
    segments, sums, aux = batch["segments"], [], []
    for depth in range(1, depths + 1):
        # Whether the predicted token belongs to the same text.
        inside = _later(segments, depth) == segments
        attend = Packed(jnp.where(inside, segments, 0))
        x, _, own = model.ahead(depth, x, _later(batch["tokens"], depth), attend)
        targets, mask = _later(batch["targets"], depth), jnp.where(inside, _later(batch["mask"], depth), 0.0)
        nll, _ = losses(how, model, x, targets)
        sums.append(WeightedMean(jnp.sum(nll * mask), jnp.sum(mask)))
        aux.append(own)
    return sum(sums[1:], sums[0]), jax.tree.map(lambda *each: jnp.stack(each), *aux)


def losses(
    how: OfTokens, model: Any, x: Float[Array, "B T D"], targets: Int[Array, "B T"], temperature: float = 1.0
) -> Losses:
    """Loss and log partition function of each target, [B T] each. Rows are not flattened, because they could then not be laid out
    over devices by the rules of a batch.

    Args:
        temperature: divides the logits.
    """
    by = jnp.asarray(1.0 / temperature, x.dtype)
    way, plain = how.head, plain_head(model)
    if way == "auto":
        roomy = 4 * targets.size * model.config.vocab <= ROOMY_BYTES * math.prod(axis_sizes().values())
        way = ("blocks" if plain and platform() == "cpu" else "logits") if roomy else "chunks"
    if way == "logits" or (way == "blocks" and not plain):
        return from_logits(model.unembed(x) / temperature, targets)
    if splits("time"):
        # Flat rows would have to be gathered first.
        return by_times(lambda x, targets: from_logits(model.unembed(x) / temperature, targets), how.chunk, x, targets)
    found: Any
    flat = targets.reshape(-1)
    if way == "blocks" and plain:
        found = vocabulary_blocks((x if temperature == 1.0 else x * by).reshape(-1, x.shape[-1]), plain[0], flat, plain[1])
    else:
        rows = x.reshape(-1, x.shape[-1])
        found = row_chunks(lambda rows: model.unembed(rows[:, None])[:, 0] / temperature, rows, flat, min(how.chunk, len(flat)))
    return found[0].reshape(targets.shape), found[1].reshape(targets.shape)


def _later(a: Array, steps: int) -> Array:
    """The entries `steps` positions later in each row; 0 beyond the end."""
    return jnp.pad(a[:, steps:], ((0, 0), (0, steps)))


def plain_head(model: Any) -> tuple[Array, str] | None:
    """The head's weight and its axes, if the head is only that product (no bias, cap, adapter or int8); otherwise None."""
    head, order = (model.embed, "VD") if model.head is None else (model.head, "DV")
    if type(head) is not Einsum or head.b is not None or getattr(model, "logit_cap", None) is not None:
        return None
    return (head.w[...], order) if isinstance(head.w, nnx.Variable) else None
