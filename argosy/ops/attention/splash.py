"""Attention for training on TPUs: JAX's splash kernels, which skip blocks of scores that no query sees (arXiv:2205.14135).

The kernels take whole sequences, causal or not, with windows, soft caps, sinks, segments, grouped queries, and values of another size
than keys. Scores are never written to memory. The forward pass keeps its output and one float32 for each query and head, from which the
backward pass computes the probabilities again. Both have the checkpoint name `KEPT`, so rematerialization keeps them and the forward
kernel runs once per step.

Queries are multiplied by the scale before the kernel, in their own dtype. In bfloat16, this is one more rounding than in the reference.
Sequences are padded to whole blocks, and heads to a multiple of 64, the sizes for which JAX tests the kernels. Nothing here was timed
on a TPU. `bench/splash_blocks.py` counts the instructions that libtpu's compiler schedules for a block.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.core.errors import Unsupported
from argosy.ops.attention import KEPT, Score, See
from argosy.ops.attention.splash_blocks import INSTRUCTIONS, LIKE, block_of, block_sizes
from argosy.ops.attention.split import cannot_split, split_over_mesh
from argosy.ops.op import Implementation
from argosy.ops.precision import wide
from argosy.parallel.scope import device_kind, platform

# Heads are padded to a multiple of this.
HEAD = 64
OLD = ("TPU v2", "TPU v3")


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    see: See,
    score: Score,
    *,
    lse: bool = False,
    interpret: bool = False,
    block: int | None = None,
) -> Any:
    """Computes `attention`. With `lse`, the result cannot be differentiated.

    Args:
        interpret: whether to run the kernels in interpret mode, for tests.
        block: the side of the kernels' blocks. None: the choice of `splash_blocks`.

    Raises:
        Unsupported: the result with `lse` is differentiated.
    """
    if lse:
        q, k, v = map(_without_gradient, (q, k, v))
    call = partial(_call, score=score, causal=see.causal, lse=lse, interpret=interpret, side=block)
    return split_over_mesh(call, q, k, v, see.q_segment, score.sinks, lse=lse)


@jax.custom_jvp
def _without_gradient(x: Array) -> Array:
    return x


@_without_gradient.defjvp
def _no_gradient(x: Any, tangents: Any) -> Any:
    raise Unsupported("attention `splash`: with its log-sum-exp it has no gradient", hint="execution.attention=reference has one")


def _call(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None,
    *, score: Score, causal: bool, lse: bool, interpret: bool, side: int | None = None,
) -> Any:  # fmt: skip
    """Computes one device's rows and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    T, N, U = q.shape[1], q.shape[2], v.shape[-1]
    wider = [-a.shape[-1] % HEAD for a in (q, k, v)]
    head = max(a.shape[-1] + more for a, more in zip((q, k, v), wider))
    block = side or block_of(T, score.window, causal, head, q.dtype.itemsize, device_kind())
    length = -(-T // block) * block
    # A window of w tokens is the query's own token and the w-1 tokens before it, and if not causal also the w-1 tokens after it.
    reach = None if score.window is None else score.window - 1
    kind = kernels.FullMask if reach is None and not causal else partial(_band(), window_size=(reach, 0 if causal else reach), offset=0)
    kernel: Any = kernels.make_splash_mha(
        kernels.MultiHeadMask([kind((length, length))] * N),
        block_sizes=kernels.BlockSizes(**block_sizes(block)),
        attn_logits_soft_cap=score.cap,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=lse,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )
    scaled = (wide(q) * score.scale).astype(q.dtype)
    behind = (0, length - T)
    rows = [
        jnp.pad(a, ((0, 0), behind, (0, 0), (0, more))).transpose(0, 2, 1, 3)
        for a, more in zip((scaled, k, v), wider)
    ]
    ids = None
    if segments is not None or (length > T and not causal):
        # Padding has a segment that no token has. Causal queries do not see padding, which comes after them.
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments
        ids = jnp.pad(ids, ((0, 0), behind), constant_values=-1)
        ids = kernels.SegmentIds(ids, ids)
    out = jax.vmap(kernel, (0, 0, 0, 0, None))(*rows, ids, sinks)
    y = (out[0] if lse else out).transpose(0, 2, 1, 3)[:, :T, :, :U]
    return (y, out[1][0].transpose(0, 2, 1)[:, :T]) if lse else y


@cache
def _band() -> Any:
    """Returns a faster version of JAX's class of window masks.

    During tracing, JAX asks for the mask of every block, which takes 37 s for 131,072 tokens. Most blocks are seen wholly or not at
    all, and this class then returns a mask of one element.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import LocalMask

    class Band(LocalMask):
        def __getitem__(self, at: Any) -> np.ndarray:
            (rows, keys), (left, right) = at, self.window_size
            assert right is not None
            # The smallest and the largest difference of the positions of a query and a key in the block.
            least, most = rows.start - (keys.stop - 1), rows.stop - 1 - keys.start
            low, high = -right, most if left is None else left
            if low <= least and most <= high:
                return np.ones((1, 1), bool)
            return super().__getitem__(at) if least <= high and low <= most else np.zeros((1, 1), bool)

    return Band


def _refuses(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    if platform() != "tpu":
        return f"a kernel for TPUs; this program is for {platform()}"
    if device_kind() in OLD:
        return f"a kernel for TPU v4 and later; this program is for a {device_kind()}"
    return splash_refusal(q, k, v, see, score, lse)


def splash_refusal(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    """Returns why the kernels cannot compute this on a TPU. None: they can."""
    if not see.aligned or see.picked is not None:
        return "only a pass over whole sequences, in which queries do not choose their keys"
    if not isinstance(q.shape[1], int):
        return "only a length that is known when the program is made"
    if see.q_prefix is not None:
        return "no prefixes of segments"
    if score.bias is not None:
        return "no bias"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"no {q.dtype.name}"
    return cannot_split(q, k)


def _blocks(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> list[int]:
    """Returns the block sides that `splash_blocks` knows, except the one that it chooses."""
    T, head = q.shape[1], max(-(-a.shape[-1] // HEAD) * HEAD for a in (q, v))
    default = block_of(T, score.window, see.causal, head, q.dtype.itemsize, device_kind())
    return [side for side in INSTRUCTIONS[LIKE][0] if side != default and side < 2 * T]


SPLASH = Implementation(splash, _refuses, _blocks)
