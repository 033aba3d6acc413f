"""Attention for training on TPUs: JAX's splash kernels, which skip blocks of scores that nobody sees (arXiv:2205.14135).

It takes whole sequences: causal or not, with windows, soft caps, sinks, segments, shared key heads, and values of another size
than keys. Scores never reach memory: the forward pass keeps its output and one float32 for each query and head, from which the
backward pass computes probabilities again. Both carry the name `KEPT`, so rematerialization keeps them and the forward kernel
runs once a step.

Queries are multiplied by the scale before the kernel, in their own type. Sequences are padded to whole blocks. XLA cannot split a
kernel, so on a mesh each device computes its own rows and heads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.ops.attention import KEPT, Implementation, Score, See
from argosy.ops.precision import wide
from argosy.ops.splash_blocks import blocks_of
from argosy.parallel.scope import activation_spec, axis_sizes, on_several_devices, platform


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    see: See,
    score: Score,
    *,
    lse: bool = False,
    interpret: bool = False,
) -> Any:
    """As `attention`; the log-sum-exp has no gradient.

    Args:
        interpret: computes the kernels with XLA, for tests.
    """
    segments = see.q_segment
    if segments is None:
        segments = jnp.zeros(q.shape[:2], jnp.int32)
    given = (q, k, v, segments, score.sinks)
    call = partial(_call, score=score, causal=see.causal, lse=lse, interpret=interpret)
    if on_several_devices():
        rows = activation_spec("B T N H", q.shape)
        k, v = (jnp.repeat(a, _copies(q, k), axis=2) if _copies(q, k) > 1 else a for a in (k, v))
        keys = PartitionSpec(rows[0], None, rows[2], None)
        heads = None if score.sinks is None else PartitionSpec(rows[2])
        out = (keys, PartitionSpec(rows[0], None, rows[2])) if lse else keys
        places = (keys, keys, keys, PartitionSpec(rows[0], None), heads)
        call = jax.shard_map(call, in_specs=places, out_specs=out, check_vma=False)
        given = (q, k, v, segments, score.sinks)
    return call(*given)


def _copies(q: Array, k: Array) -> int:
    """How often each key head is repeated, so that every device has as many as another."""
    split = _shares(q)
    return 1 if k.shape[2] % split == 0 else split // k.shape[2]


def _shares(q: Array) -> int:
    """The number of devices over which heads are split."""
    sizes = axis_sizes()
    n = 1
    for axis in activation_spec("B T N H", q.shape)[2] or ():
        n *= sizes[axis]
    return n


def _call(
    q: Array, k: Array, v: Array, segments: Int[Array, "B T"], sinks: Float[Array, "N"] | None,
    *, score: Score, causal: bool, lse: bool, interpret: bool,
) -> Any:  # fmt: skip
    """What one device computes."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    B, T, N, H = q.shape
    length, sizes = blocks_of(T, H, v.shape[-1])
    # A window of w tokens is the token itself and w-1 before it (and, without causality, w-1 behind it).
    left = None if score.window is None else score.window - 1
    mask = kernels.LocalMask((length, length), (left, 0 if causal else left), 0)
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * N),
        block_sizes=kernels.BlockSizes(**sizes),
        attn_logits_soft_cap=score.cap,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=lse,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )
    scaled = (wide(q) * score.scale).astype(q.dtype)
    padded = ((0, 0), (0, length - T), (0, 0), (0, 0))
    rows = [jnp.pad(a, padded).transpose(0, 2, 1, 3) for a in (scaled, k, v)]
    # No token has the segment of the padding.
    own = jnp.pad(segments, padded[:2], constant_values=-1)
    out = jax.vmap(kernel, (0, 0, 0, 0, None))(*rows, kernels.SegmentIds(own, own), sinks)
    y = (out[0] if lse else out).transpose(0, 2, 1, 3)[:, :T]
    return (y, out[1][0].transpose(0, 2, 1)[:, :T]) if lse else y


def _refuses(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    if platform() != "tpu":
        return f"a kernel for TPUs; this program is for {platform()}"
    return cannot(q, k, v, see, score, lse)


def cannot(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    """Why the kernel cannot compute this on a TPU; None if it can."""
    if not see.aligned or see.picked is not None:
        return "only a pass over whole sequences, without a choice of keys"
    if not isinstance(q.shape[1], int):
        return "only a length that is known when the program is made"
    return None


SPLASH = Implementation(splash, _refuses)
