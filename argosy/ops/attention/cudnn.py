"""Attention for training on NVIDIA GPUs: cuDNN's kernel, as JAX calls it, in bfloat16 and float16.

The kernel supports causal attention and windows. Segments are passed as a mask [B T T], which the kernel reads as a bias for all heads.
A window is then part of the mask, because the kernel's windows allow no bias. The forward pass keeps its output and one float32 for
each query and head. Rematerialization keeps these too (`KEPT_PRIMITIVES`), so that the forward kernel runs once per step.

Programs with this kernel are compiled for an H100 in tests (`tests/ops/test_attention_cudnn.py`). This does not show that they run,
since cuDNN builds its plans on the device. The call is tested against the reference with XLA in place of cuDNN. The speed has not been
measured.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.ops.attention import Score, See, of_segments
from argosy.ops.attention.split import cannot_split, split_over_mesh
from argosy.ops.op import Implementation
from argosy.parallel.scope import platform

# Heads are padded to a multiple of HEAD, and have at most LARGEST features. Whether larger heads are supported depends on the GPU.
HEAD, LARGEST = 8, 128
# The lowest compute capability that supports the kernel.
LEAST = 8.0
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    see: See,
    score: Score,
    *,
    lse: bool = False,
    kernel: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Computes `attention`, without log-sum-exp.

    Args:
        kernel: "xla" computes the same call without a GPU, for tests.
    """
    call = partial(_call, score=score, causal=see.causal, kernel=kernel)
    segments: Any = see.q_segment
    if see.q_prefix is not None:
        segments = jnp.stack([segments, see.q_prefix], -1)
    return split_over_mesh(call, q, k, v, segments, None)


def _call(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, *, score: Score, causal: bool, kernel: Any
) -> Array:
    """Computes one device's rows and heads."""
    T, U = q.shape[1], v.shape[-1]
    size = -(-max(q.shape[-1], U) // HEAD) * HEAD
    window = score.window
    mask = None
    if segments is not None or (window is not None and not causal):
        # With a mask, the kernel needs an even length. Padding has a segment that no token has.
        behind = (0, T % 2)
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments
        ids = jnp.pad(ids, ((0, 0), behind, *[(0, 0)] * (ids.ndim - 2)), constant_values=-1)
        ids, prefix = (ids, None) if ids.ndim == 2 else (ids[..., 0], ids[..., 1])
        mask = of_segments(ids, ids, prefix)
        if window is not None:
            at = jnp.arange(T + T % 2)
            mask &= jnp.abs(at[:, None] - at[None, :]) < window
        mask, window = mask[:, None], None
    else:
        behind = (0, 0)
    padded = [jnp.pad(a, ((0, 0), behind, (0, 0), (0, size - a.shape[-1]))) for a in (q, k, v)]
    y = jax.nn.dot_product_attention(
        *padded,
        mask=mask,
        scale=score.scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=kernel,
    )
    return y[:, :T, :, :U]


def _refuses(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    if platform() != "gpu":
        return f"a kernel for NVIDIA GPUs; this program is for {platform()}"
    if not any(map(find_spec, PLUGINS)):
        return "needs JAX's plugin for CUDA, which is not installed"
    if (capability := _capability()) is not None and capability < LEAST:
        return f"a kernel for compute capability {LEAST} (Ampere) and later; this GPU has {capability}"
    return cudnn_refusal(q, k, v, see, score, lse)


def _capability() -> float | None:
    """Returns the compute capability of the first device. None if the device is not a GPU, since programs may be compiled for a
    described GPU elsewhere."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability is None else float(capability)


def cudnn_refusal(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    """Returns why the kernel cannot compute this on an NVIDIA GPU. None: it can."""
    if not see.aligned or see.picked is not None:
        return "only a pass over whole sequences, in which queries do not choose their keys"
    if not isinstance(q.shape[1], int):
        return "only a length that is known when the program is made"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"no {q.dtype.name}, only bfloat16 and float16"
    if score.cap is not None or score.sinks is not None or score.bias is not None:
        return "no soft cap, no sinks and no bias"
    if lse:
        return "no log-sum-exp"
    if (size := max(q.shape[-1], v.shape[-1])) > LARGEST:
        return f"heads of {size}, of {LARGEST} at most"
    return cannot_split(q, k)


CUDNN = Implementation(cudnn, _refuses)
