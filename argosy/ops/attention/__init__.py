"""Softmax attention: which keys a query sees, how scores are computed, and several implementations of the same function.

    attention_reference   the specification: dense, with any score
    blocked               for CPUs, with its own backward pass: causal attention in blocks of rows, other attention in a loop
    splash                for TPUs: kernels that keep scores out of memory
    cudnn                 for NVIDIA GPUs: a kernel that keeps scores out of memory
    ring                  for sequences that are split over devices

All are implementations of the op `ATTENTION`. It chooses the first implementation for the platform that can compute the call, otherwise
the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from argosy.ops.op import Implementation, Op
from argosy.ops.precision import sums_in, wide

# The score of a key that a query does not see.
UNSEEN = -1e30
# The position of a key that belongs to no row: after every query.
NOWHERE = np.int32(2**30)
# The residuals of a kernel's backward pass have this checkpoint name, or are outputs of one of these operations of JAX.
# Rematerialization keeps them, so that the forward kernel runs once.
KEPT = "attention kernel"
KEPT_PRIMITIVES = ("dot_product_attention_fwd_wrapper",)


@dataclass(frozen=True)
class Score:
    """How scores are computed from queries and keys. This depends on the layer only. Implementations that cannot compute it refuse.

    scale: a factor on the product of query and key.
    window: a query sees its own token and the window - 1 tokens before it. None: all earlier tokens.
    cap: the soft cap, cap * tanh(score / cap). None: no cap.
    sinks: an additional logit for each head, which is part of the softmax but has no value (gpt-oss).
    chunked: whether sequences are cut into chunks of `window` tokens, and a query sees only its own chunk (Llama 4).
    bias: is added to the scaled scores of every row (T5, arXiv:1910.10683).
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Float[Array, "N"] | None = None
    chunked: bool = False
    bias: Float[Array, "N T S"] | None = None


@dataclass(frozen=True)
class See:
    """Which keys a query sees: those of its own segment and, if causal, none after itself.

    q_at, k_at: the positions of queries and keys.
    q_segment, k_segment: the segments of queries and keys. None: each row is one segment.
    causal: whether a query does not see keys at later positions.
    aligned: whether queries and keys are the same tokens in the same order, at positions 0..T-1.
    picked: a further mask, for sparse attention. None: no further mask.
    q_prefix: for each query, a segment that it sees in addition to its own. 0: none.
    """

    q_at: Int[Array, "B T"]
    k_at: Int[Array, "B S"]
    q_segment: Int[Array, "B T"] | None = None
    k_segment: Int[Array, "B S"] | None = None
    causal: bool = True
    aligned: bool = False
    picked: Bool[Array, "B T S"] | None = None
    q_prefix: Int[Array, "B T"] | None = None

    def dense(self, window: int | None) -> Bool[Array, "B T S"]:
        ahead = self.q_at[:, :, None] - self.k_at[:, None, :]
        seen = jnp.ones(ahead.shape, bool)
        if self.causal:
            seen &= ahead >= 0
        if window is not None:
            seen &= (ahead if self.causal else jnp.abs(ahead)) < window
        if self.q_segment is not None and self.k_segment is not None:
            seen &= of_segments(self.q_segment, self.k_segment, self.q_prefix)
        return seen if self.picked is None else seen & self.picked


def of_segments(q: Int[Array, "B T"], k: Int[Array, "B S"], prefix: Int[Array, "B T"] | None) -> Bool[Array, "B T S"]:
    """Returns the mask of the keys in the query's segment or in the segment that is its prefix. Prefix 0 matches nothing."""
    mask = q[:, :, None] == k[:, None, :]
    return mask if prefix is None else mask | ((prefix[:, :, None] == k[:, None, :]) & (prefix > 0)[:, :, None])


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    see: See,
    score: Score,
    implementation: str | None = None,
    *,
    lse: bool = False,
) -> Any:
    """Computes softmax(q k' * scale) v, [B T N U]. Each of the K key heads serves N / K query heads (arXiv:2305.13245).

    The output of a query that sees no key (padding) is finite and has no meaning. Values v that no query sees must be finite.

    Args:
        implementation: the name of an implementation. Default: the one of the context `op.implementations`, otherwise the op's choice.
        lse: whether to return (output, log-sum-exp of each query's scores [B T N]) instead of the output. The log-sum-exp is float32 at
            least, and -1e30 if the query sees no key. With it, `merge_attention` combines outputs over parts of the keys.

    Raises:
        Unsupported: the requested implementation cannot compute this.
    """
    return ATTENTION.choose(q, k, v, see, score, lse, implementation=implementation).run(q, k, v, see, score, lse=lse)


def attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    see: See,
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """Computes attention with all scores at once, in float32 at least. Arguments as in `attention`."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=sums_in(q.dtype)) * score.scale
    if score.cap is not None:
        s = score.cap * jnp.tanh(s / score.cap)
    if score.bias is not None:
        s = s + score.bias.astype(s.dtype).reshape(1, K, N // K, T, -1)
    s = jnp.where(see.dense(score.window)[:, None, None], s, UNSEEN)
    if score.sinks is not None:
        sink = jnp.broadcast_to(score.sinks.astype(s.dtype).reshape(1, K, N // K, 1, 1), (B, K, N // K, T, 1))
        s = jnp.concatenate([s, sink], -1)
    p = jax.nn.softmax(s, -1)
    p = p if score.sinks is None else p[..., :-1]
    y = jnp.einsum("BKGTS,BSKU->BTKGU", p.astype(v.dtype), v).reshape(B, T, N, v.shape[-1])
    if not lse:
        return y
    return y, jnp.moveaxis(jax.nn.logsumexp(s, -1), 3, 1).reshape(B, T, N)


def merge_attention(parts: Sequence[tuple[Float[Array, "B T N U"], Float[Array, "B T N"]]]) -> tuple[Array, Array]:
    """Combines (output, log-sum-exp) of attention over disjoint parts of the keys to those over all keys."""
    lses = jnp.stack([lse for _, lse in parts])
    total = jax.nn.logsumexp(lses, 0)
    shares = jnp.exp(lses - total)
    y = sum(share[..., None] * wide(y) for share, (y, _) in zip(shares, parts))
    return jnp.asarray(y).astype(parts[0][0].dtype), total


# What to try first on each platform. docs/reference/kernels.md says what is known of the speed of implementations. The reference
# computes [B N T S] scores in memory, so on TPUs and GPUs kernels are preferred to the reference without a measurement. `ring` refuses
# unless sequences are split over devices.
ATTENTION = Op(
    "attention",
    "attention",
    prefer={"cpu": ("blocked",), "tpu": ("splash",), "gpu": ("cudnn",)},
    always=("ring",),
    case="argosy.ops.attention.case:attention_case",
)
ATTENTION.add("reference", Implementation(attention_reference))
ATTENTION.add("blocked", "argosy.ops.attention.blocked:BLOCKED")
ATTENTION.add("splash", "argosy.ops.attention.splash:SPLASH")
ATTENTION.add("cudnn", "argosy.ops.attention.cudnn:CUDNN")
ATTENTION.add("ring", "argosy.ops.attention.ring:RING")
