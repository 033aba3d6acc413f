"""A description of a call of attention, without data: what `argosy autotune` measures and stores a winner for."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.ops.attention import Score, See
from argosy.ops.op import Implementation
from argosy.ops.sizes import next_power_of_two


@dataclass(frozen=True)
class AttentionCase:
    """Describes a call of `attention`.

    q, k, v: the shapes [B T N H], [B S K H] and [B S K U] of queries, keys and values.
    segments, prefix, picked: whether `See` has these.
    sinks, bias: whether `Score` has these.

    The other fields are those of `See`, `Score` and `attention`.
    """

    q: tuple[int, int, int, int]
    k: tuple[int, int, int, int]
    v: tuple[int, int, int, int]
    dtype: str
    causal: bool = True
    aligned: bool = True
    segments: bool = False
    prefix: bool = False
    picked: bool = False
    window: int | None = None
    chunked: bool = False
    cap: float | None = None
    sinks: bool = False
    bias: bool = False
    lse: bool = False
    op: str = "attention"

    @property
    def name(self) -> str:
        B, T, N, H = self.q
        sizes = f"B{next_power_of_two(B)} T{next_power_of_two(T)} S{next_power_of_two(self.k[1])} N{N} K{self.k[2]} H{H} U{self.v[-1]}"
        flags = ("causal", "aligned", "segments", "prefix", "picked", "chunked", "sinks", "bias", "lse")
        options = [flag for flag in flags if getattr(self, flag)]
        options += [f"{key}={getattr(self, key)}" for key in ("window", "cap") if getattr(self, key) is not None]
        return " ".join([self.op, self.dtype, sizes, *options])

    @property
    def rows(self) -> int:
        return self.q[0]

    def cut(self, rows: int) -> "AttentionCase":
        """Returns the case with fewer rows of the batch."""
        return replace(self, q=(rows, *self.q[1:]), k=(rows, *self.k[1:]), v=(rows, *self.v[1:]))

    @property
    def reference_bytes(self) -> int:
        """The memory that the reference takes for one row: scores, probabilities and the gradients of both."""
        return 16 * self.q[2] * self.q[1] * self.k[1]

    def arguments(self, seed: int = 0) -> tuple[tuple[Array, ...], dict[str, Array | None]]:
        """Returns random arguments: (arrays to differentiate with respect to, other arrays by name)."""
        rng = np.random.default_rng(seed)
        q, k, v = (jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in (self.q, self.k, self.v))
        (B, T, N, _), S = self.q, self.k[1]

        def rows(length: int, split: bool = False) -> Array:
            at = np.arange(length)
            return jnp.asarray(np.broadcast_to(1 + (at >= length // 2) if split else at, (B, length)), jnp.int32)

        return (q, k, v), {
            "q_at": rows(T),
            "k_at": rows(S),
            # Two segments in each row.
            "q_segment": rows(T, split=True) if self.segments else None,
            "k_segment": rows(S, split=True) if self.segments else None,
            "q_prefix": jnp.zeros((B, T), jnp.int32) if self.prefix else None,
            "picked": jnp.asarray(rng.random((B, T, S)) < 0.5).at[:, :, 0].set(True) if self.picked else None,
            "sinks": jnp.asarray(rng.standard_normal(N), jnp.float32) if self.sinks else None,
            "bias": jnp.asarray(rng.standard_normal((N, T, S)), jnp.float32) if self.bias else None,
        }

    def described(self, inputs: tuple[Array, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the arguments of `Implementation.refuses`, from the result of `arguments`."""
        sinks, bias = more["sinks"], more["bias"]
        rest = {name: value for name, value in more.items() if name not in ("sinks", "bias")}
        see = See(**rest, causal=self.causal, aligned=self.aligned)
        return *inputs, see, Score(self.q[-1] ** -0.5, self.window, self.cap, sinks, self.chunked, bias), self.lse

    def call(self, implementation: Implementation, inputs: tuple[Array, ...], more: dict[str, Any]) -> Array:
        *arguments, lse = self.described(inputs, more)
        out = implementation.run(*arguments, lse=lse)
        return out[0] if lse else out


def attention_case(q: Any, k: Any, v: Any, see: See, score: Score, lse: bool = False) -> AttentionCase | None:
    """Describes arguments of `attention`, which may be tracers. None: a size is symbolic."""
    shapes = [a.shape for a in (q, k, v)]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    has = {"segments": see.q_segment, "prefix": see.q_prefix, "picked": see.picked, "sinks": score.sinks, "bias": score.bias}
    return AttentionCase(
        *shapes,
        dtype=jax.dtypes.canonicalize_dtype(q.dtype).name,
        causal=see.causal,
        aligned=see.aligned,
        **{name: value is not None for name, value in has.items()},
        window=score.window,
        chunked=score.chunked,
        cap=score.cap,
        lse=lse,
    )
