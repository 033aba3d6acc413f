"""Computes the cross-entropy of each token under a model, in limited memory where the vocabulary is large. Most objectives use it."""

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
from argosy.ops.vocabulary_scan import HeadLayout, vocabulary_scan
from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, platform, splits, weight_spec
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
    """Computes the cross-entropy and the log partition function of each target, [B T] each. The result keeps the axes of the batch, so
    that it can be sharded over devices as a batch is.

    Args:
        x: the input of the model's head.
        temperature: the divisor of the logits.
    """
    by = jnp.asarray(1.0 / temperature, x.dtype)
    way, plain = settings.head, plain_head(model)
    if way == "auto":
        roomy = 4 * targets.size * model.config.vocab <= ROOMY_BYTES * math.prod(axis_sizes().values())
        way = ("blocks" if plain and platform() == "cpu" else "logits") if roomy else "chunks"
    if way == "logits" or (way == "blocks" and not plain):
        return from_logits(model.unembed(x) / temperature, targets)
    if way == "chunks" and (layout := head_layout(model, targets, settings.chunk)) and (temperature == 1.0 or layout.cap is None):
        return vocabulary_scan(x if temperature == 1.0 else x * by, _head(model)[0].w[...], targets, layout)
    rows = rows_at_once(settings.chunk, targets.shape)
    if splits("time"):
        # Flat rows would have to be gathered first.
        return by_times(lambda x, targets: from_logits(model.unembed(x) / temperature, targets), rows, x, targets)
    flat_losses: Any
    flat = targets.reshape(-1)
    if way == "blocks" and plain:
        flat_losses = vocabulary_blocks((x if temperature == 1.0 else x * by).reshape(-1, x.shape[-1]), plain[0], flat, plain[1])
    else:
        every = x.reshape(-1, x.shape[-1])
        flat_losses = row_chunks(lambda rows: model.unembed(rows[:, None])[:, 0] / temperature, every, flat, min(rows, len(flat)))
    return flat_losses[0].reshape(targets.shape), flat_losses[1].reshape(targets.shape)


def rows_at_once(chunk: int, shape: tuple[int, ...]) -> int:
    """Returns the number of tokens of a whole batch that are computed at once, of which each device has `chunk`.

    Args:
        shape: the shape of the batch, (B, T).
    """
    return chunk * math.prod(axis_sizes()[axis] for axis in axes_in(activation_spec("B T", shape)))


def _head(model: Any) -> tuple[Any, str]:
    """Returns the head of a model, which is the embedding if the two are tied, and the axes of its weight."""
    return (model.embed, "VD") if model.head is None else (model.head, "DV")


def head_layout(model: Any, targets: Int[Array, "B T"], chunk: int) -> HeadLayout | None:
    """Returns the sharding of the head and the targets, if the head is only a matrix product with or without a logit cap; otherwise
    None.
    """
    head, order = _head(model)
    if type(head) is not Einsum or head.b is not None or not isinstance(head.w, nnx.Variable):
        return None
    rows = activation_spec("B T", targets.shape)
    weight = weight_spec(head.axes, head.w.shape, frozenset(axis_sizes()))
    return HeadLayout(rows, weight, order, chunk, getattr(model, "logit_cap", None))


def plain_head(model: Any) -> tuple[Array, str] | None:
    """Returns the weight of the head and its axes, if the head is only a matrix product (no bias, cap, adapter or int8); otherwise
    None.
    """
    head, order = _head(model)
    if type(head) is not Einsum or head.b is not None or getattr(model, "logit_cap", None) is not None:
        return None
    return (head.w[...], order) if isinstance(head.w, nnx.Variable) else None
