"""Looks up rows of an embedding that is split over devices.

If devices with different rows share the features of the weight, as in FSDP, each device looks up its own features for the tokens of all
devices, and sends them to the devices of those tokens:

    ids [B T] of every device    ->    this device's features for all these ids    ->    all features for this device's own ids

No device ever holds the whole weight or the whole gradient. A gathered weight would take [V D] on each device, and its gradient [V D]
in float32 (5.6 GB each way for 262,208 tokens of 5,376 features). How much is sent depends on the number of rows, not on the
vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, gathered_weight, weight_spec


def embedding_rows(w: Float[Array, "V D"], axes: tuple[str, ...], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Returns w[ids], in the dtype of w.

    Args:
        axes: the logical axes of w.
    """
    if ids.ndim != 2:
        return w[ids]
    rows, stored = activation_spec("B T", ids.shape), weight_spec(axes, w.shape, frozenset(axis_sizes()))
    vocab, features = (*stored, None, None)[:2]
    split = axes_in(rows)
    # With pipeline stages, XLA on CPUs may start these exchanges in a different order on each device, which deadlocks.
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
    """Looks up rows of a vocabulary that is split over a mesh axis. Returns 0 for rows of other devices."""
    size = w.shape[0]
    at = ids - jax.lax.axis_index(axis) * size
    return jnp.where(((at >= 0) & (at < size))[..., None], w[jnp.clip(at, 0, size - 1)], 0)
