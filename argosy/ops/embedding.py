"""Rows of an embedding on devices that share rows and weights.

Where the features of the weight are split over devices that have different rows, as FSDP splits them, each device looks up its features
for the tokens of all, and sends them to the devices of those tokens:

    ids [B T] of every device    ->    its features of all their rows    ->    all features of its own rows

So neither the weight nor its gradient is whole on any device: a gathered weight would be [V D] there, and its gradient [V D] in float32
(5.6 GB each way for 262,208 tokens of 5,376 features). What travels is what the rows have, whatever the vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, gathered_weight, weight_spec


def embedding_rows(w: Float[Array, "V D"], axes: tuple[str, ...], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """w[ids], in the type of w.

    Args:
        axes: the logical axes of w.
    """
    if ids.ndim != 2:
        return w[ids]
    rows, stored = activation_spec("B T", ids.shape), weight_spec(axes, w.shape, frozenset(axis_sizes()))
    vocab, features = (*stored, None, None)[:2]
    split = axes_in(rows)
    # Beside the exchanges of a pipeline, XLA on CPUs begins these in another order on other devices, which then wait for ever.
    if features not in split or vocab in split or axis_sizes().get("stage", 1) > 1:
        return gathered_weight(w, axes, ids)[ids]

    def local(w: Array, ids: Array) -> Array:
        every = jax.lax.all_gather(ids, features)
        vectors = w[every] if vocab is None else _of_part(w, every, vocab)
        vectors = jax.lax.all_to_all(vectors, features, 0, 3, tiled=True)[0]
        return vectors if vocab is None else jax.lax.psum(vectors, vocab)

    names, out = frozenset(axis_sizes()), PartitionSpec(*rows, None)
    return jax.shard_map(local, in_specs=(stored, rows), out_specs=out, axis_names=names, check_vma=False)(w, ids)


def _of_part(w: Array, ids: Array, axis: str) -> Array:
    """Rows of a vocabulary that is split over a mesh axis; 0 for those of other devices."""
    size = w.shape[0]
    at = ids - jax.lax.axis_index(axis) * size
    return jnp.where(((at >= 0) & (at < size))[..., None], w[jnp.clip(at, 0, size - 1)], 0)
