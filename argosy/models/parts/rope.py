"""Rotary positions, with their scaling as data. Su et al. 2021 (arXiv:2104.09864).

Frequencies are NumPy constants of the traced program. Angles are float32: bfloat16 rounds position 257 to 256.
"""

import math
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Choice, Settings


class Linear(Settings):
    """Every position divided by `factor`. Chen et al. 2023 (arXiv:2306.15595)."""

    factor: float = Field(gt=0)
    """Longer by this factor than the model was trained for."""

    def apply(self, freq: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        return freq / self.factor, 1.0


class Llama3(Settings):
    """Slow rotations divided by `factor`, fast ones kept, a ramp between. Llama 3.1 (arXiv:2407.21783)."""

    factor: float = Field(8.0, gt=0)
    """Longer by this factor than the model was trained for."""
    low: float = 1.0
    """Fewer turns than this over the original context: divided."""
    high: float = 4.0
    """More turns than this: kept."""
    original: int = 8192
    """The original context, in tokens."""

    def apply(self, freq: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        turns = self.original * freq / (2 * math.pi)
        ramp = max(self.high - self.low, 1e-9)  # Llama 4 Scout has none: low and high are 1
        kept = np.clip((turns - self.low) / ramp, 0, 1)
        return freq * kept + freq / self.factor * (1 - kept), 1.0


class Yarn(Settings):
    """By parts, and sharper attention. Peng et al. 2023 (arXiv:2309.00071)."""

    factor: float = Field(gt=0)
    """Longer by this factor than the model was trained for."""
    original: int
    """The original context, in tokens."""
    fast: float = 32.0
    """More turns than this over the original context: kept (`beta_fast`)."""
    slow: float = 1.0
    """Fewer turns than this: divided (`beta_slow`)."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention: float | None = None
    """Factor on cosine and sine; 0.1 ln(factor) + 1 unless told."""
    mscale: float | None = None
    """With `mscale_all_dim`: the factor is the ratio of 0.1 mscale ln(factor) + 1 of the two (DeepSeek, arXiv:2405.04434)."""
    mscale_all_dim: float | None = None
    """See `mscale`; latent attention also multiplies its scores by the square of this one's."""

    def sharpening(self, mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def apply(self, freq: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        half = len(freq)

        def dimension(turns: float) -> float:
            return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)

        low, high = dimension(self.fast), dimension(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        high = high + 0.001 if low == high else high
        divided = np.clip((np.arange(half) - low) / (high - low), 0, 1)
        sharper = self.attention
        if sharper is None and self.mscale and self.mscale_all_dim:
            sharper = self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        elif sharper is None:
            sharper = self.sharpening()
        return freq * (1 - divided) + freq / self.factor * divided, sharper


class LongRope(Settings):
    """A divisor of its own for each pair, from one list up to the original context and from another beyond.
    Ding et al. 2024 (arXiv:2402.13753).

    Which list is decided once for a model (`decided`), as vLLM does, and not for each sequence, as transformers does: keys turned
    by one list cannot meet queries turned by the other, and a rollout that may become long must agree with the training step
    that sees how long it became.
    """

    short: tuple[float, ...]
    """Divisors of sequences within the original context, one for each pair."""
    long: tuple[float, ...]
    """Divisors of longer ones."""
    original: int = Field(gt=1)
    """The original context, in tokens."""
    attention: float = 1.0
    """Factor on cosine and sine, at any length."""
    table: Literal["auto", "short", "long"] = "auto"
    """Which divisors: auto takes the long ones where the model's context is longer than the original. transformers takes the
    short ones for any sequence within the original context, so set `short` to reproduce it on short texts."""

    def apply(self, freq: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        if self.table == "auto":
            raise ValueError("longrope: decide between the tables first (`Rope.decided`)")
        for divisors in (self.short, self.long):
            if len(divisors) != len(freq):
                raise ValueError(f"{len(divisors)} divisors for {len(freq)} rotary pairs")
        return freq / np.asarray(self.short if self.table == "short" else self.long), self.attention


SCALINGS = Registry("rope scaling", {"linear": Linear, "llama3": Llama3, "yarn": Yarn, "longrope": LongRope})


class Rope(Settings):
    """Rotary positions."""

    base: float = Field(10_000.0, gt=1)
    """The slowest pair turns once in about 2 pi times this many tokens."""
    scaling: Annotated[Any, Choice(SCALINGS, tag="kind")] | None = None
    """How a longer context than the original is reached."""
    pairs: Literal["halves", "interleaved"] = "halves"
    """Feature i turns with i + H/2 (halves), or 2i with 2i + 1."""
    part: float = Field(1.0, gt=0, le=1)
    """The share of a head that turns: its first features. The others carry no position."""

    def decided(self, context: int) -> "Rope":
        """These positions for a model of this context, with one table of frequencies where the scaling has two."""
        scaling = self.scaling
        if not isinstance(scaling, LongRope) or scaling.table != "auto":
            return self
        table = "long" if context > scaling.original else "short"
        return self.model_copy(update={"scaling": scaling.model_copy(update={"table": table})})

    def turned(self, size: int) -> int:
        """How many features of a head of this size turn."""
        return int(size * self.part)

    def key(self, size: int) -> str:
        """What names its table of angles for features of this size."""
        return f"{size} {self!r}"

    def frequencies(self, size: int) -> tuple[np.ndarray, float]:
        """Radians per token of each of the size/2 pairs, and the factor on cosine and sine."""
        freq = self.base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.scaling is None:
            return freq, 1.0
        return self.scaling.apply(freq, self.base)


Turns = tuple[tuple[Rope, int], ...]  # what a layer turns by, and how many features of a head
Angles = tuple[Float[Array, "B T 1 pairs"], Float[Array, "B T 1 pairs"]]


def angles(at: Int[Array, "B T"], rope: Rope, size: int) -> Angles:
    """Cosine and sine of each position, for features of this size that turn.

    A stack computes them once for all its layers. XLA:CPU still fuses the cosine into each place that reads it, with or without an
    optimization barrier; a loop over rows stops that and is no faster (docs/log.md).
    """
    freq, factor = rope.frequencies(size)
    angle = at.astype(jnp.float32)[:, :, None, None] * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x: Float[Array, "B T N H"], rope: Rope, table: Angles) -> Float[Array, "B T N H"]:
    """Turns each pair of features by its position."""
    size, (cos, sin) = rope.turned(x.shape[-1]), table
    y = x[..., :size].astype(jnp.float32)
    if rope.pairs == "interleaved":
        a, b = y[..., 0::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)
    else:
        a, b = jnp.split(y, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], -1)
