"""Softmax attention: who sees whom, how scores are made, and implementations of the same function.

`reference` is the specification: dense, any score. `blocked` is for CPUs: causal rows in blocks that see their prefix only,
with its own backward pass. Further kernels register in `IMPLEMENTATIONS`; `attention(...)` takes the first that can.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.core.errors import Unsupported
from argosy.core.registry import Registry


@dataclass(frozen=True)
class Score:
    """How a query and a key make a score. It belongs to the layer; an implementation that cannot honour it refuses.

    window: a query sees itself and the window-1 tokens before it. chunked: of these only the ones in its own chunk: sequences
    are cut every `window` tokens (Llama 4). cap: scores become cap * tanh(score / cap).
    sinks: one more logit for each head that takes weight and gives nothing (gpt-oss).
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Float[Array, "N"] | None = None
    chunked: bool = False


@dataclass(frozen=True)
class See:
    """Which keys a query may see: those of its own segment and, if causal, not after it.

    aligned: queries and keys are the same tokens in the same order, positions 0..T-1. picked: of those, only these.
    """

    q_at: Int[Array, "B T"]
    k_at: Int[Array, "B S"]
    q_segment: Int[Array, "B T"] | None = None
    k_segment: Int[Array, "B S"] | None = None
    causal: bool = True
    aligned: bool = False
    picked: Bool[Array, "B T S"] | None = None

    def dense(self, window: int | None) -> Bool[Array, "B T S"]:
        ahead = self.q_at[:, :, None] - self.k_at[:, None, :]
        seen = jnp.ones(ahead.shape, bool)
        if self.causal:
            seen &= ahead >= 0
        if window is not None:
            seen &= (ahead if self.causal else jnp.abs(ahead)) < window
        if self.q_segment is not None and self.k_segment is not None:
            seen &= self.q_segment[:, :, None] == self.k_segment[:, None, :]
        return seen if self.picked is None else seen & self.picked


class Implementation(NamedTuple):
    """A function of (q, k, v, see, score), and why it cannot be used, or None."""

    run: Callable[..., Array]
    refuses: Callable[[Any, Any, Any, See, Score], str | None]


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    see: See,
    score: Score,
    implementation: str | None = None,
) -> Float[Array, "B T N U"]:
    """softmax(q k' * scale) v, each of the K key heads serving N/K query heads (arXiv:2305.13245).

    A query that sees nothing (padding) gets finite values of no meaning.

    Raises:
        Unsupported: the implementation asked for by name cannot do this.
    """
    if implementation is not None:
        chosen: Implementation = IMPLEMENTATIONS[implementation]
        if reason := chosen.refuses(q, k, v, see, score):
            raise Unsupported(f"attention `{implementation}`: {reason}")
        return chosen.run(q, k, v, see, score)
    for name in PREFERENCE.get(jax.default_backend(), ()):
        chosen = IMPLEMENTATIONS[name]
        if chosen.refuses(q, k, v, see, score) is None:
            return chosen.run(q, k, v, see, score)
    return reference(q, k, v, see, score)


def reference(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K U"], see: See, score: Score
) -> Float[Array, "B T N U"]:
    """All scores at once, in float32."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * score.scale
    if score.cap is not None:
        s = score.cap * jnp.tanh(s / score.cap)
    s = jnp.where(see.dense(score.window)[:, None, None], s, -1e30)
    if score.sinks is None:
        p = jax.nn.softmax(s, -1)
    else:
        sink = jnp.broadcast_to(score.sinks.astype(jnp.float32).reshape(1, K, N // K, 1, 1), (B, K, N // K, T, 1))
        p = jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[..., :-1]
    return jnp.einsum("BKGTS,BSKU->BTKGU", p.astype(v.dtype), v).reshape(B, T, N, v.shape[-1])


REFERENCE = Implementation(reference, lambda *_: None)

IMPLEMENTATIONS = Registry("attention implementation")
IMPLEMENTATIONS.add("reference", REFERENCE)
IMPLEMENTATIONS.add("blocked", "argosy.ops.attention_blocked:BLOCKED")

# What to try first on each backend. Each entry was measured to be faster there: docs/log.md.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("blocked",)}
