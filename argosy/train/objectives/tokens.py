"""Losses of tokens under a model, however large its vocabulary: what most objectives read."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field as BatchField
from argosy.data.batch import Fields
from argosy.models.parts.einsum import Einsum
from argosy.ops.cross_entropy import by_times, from_logits, row_chunks, vocabulary_blocks
from argosy.parallel.scope import axis_sizes, platform, splits
from argosy.train.objectives.objective import TokenObjective

Losses = tuple[Float[Array, "B T"], Float[Array, "B T"]]
# Float32 logits of up to this size per device are kept in memory.
ROOMY_BYTES = 2 << 30
FIELDS: Fields = {
    "tokens": BatchField("B T", np.int32),
    "targets": BatchField("B T", np.int32),
    "segments": BatchField("B T", np.int32),
    "mask": BatchField("B T", np.float32),
}


def losses(
    settings: TokenObjective, model: Any, x: Float[Array, "B T D"], targets: Int[Array, "B T"], temperature: float = 1.0
) -> Losses:
    """Loss and log partition function of each target, [B T] each. Rows are not flattened, because they could then not be laid out
    over devices by the rules of a batch.

    Args:
        temperature: divides the logits.
    """
    by = jnp.asarray(1.0 / temperature, x.dtype)
    way, plain = settings.head, plain_head(model)
    if way == "auto":
        roomy = 4 * targets.size * model.config.vocab <= ROOMY_BYTES * math.prod(axis_sizes().values())
        way = ("blocks" if plain and platform() == "cpu" else "logits") if roomy else "chunks"
    if way == "logits" or (way == "blocks" and not plain):
        return from_logits(model.unembed(x) / temperature, targets)
    if splits("time"):
        # Flat rows would have to be gathered first.
        return by_times(lambda x, targets: from_logits(model.unembed(x) / temperature, targets), settings.chunk, x, targets)
    found: Any
    flat = targets.reshape(-1)
    if way == "blocks" and plain:
        found = vocabulary_blocks((x if temperature == 1.0 else x * by).reshape(-1, x.shape[-1]), plain[0], flat, plain[1])
    else:
        rows = x.reshape(-1, x.shape[-1])
        found = row_chunks(lambda rows: model.unembed(rows[:, None])[:, 0] / temperature, rows, flat, min(settings.chunk, len(flat)))
    return found[0].reshape(targets.shape), found[1].reshape(targets.shape)


def plain_head(model: Any) -> tuple[Array, str] | None:
    """The head's weight and its axes, if the head is only that product (no bias, cap, adapter or int8); otherwise None."""
    head, order = (model.embed, "VD") if model.head is None else (model.head, "DV")
    if type(head) is not Einsum or head.b is not None or getattr(model, "logit_cap", None) is not None:
        return None
    return (head.w[...], order) if isinstance(head.w, nnx.Variable) else None
