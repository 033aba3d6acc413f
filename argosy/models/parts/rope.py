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
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
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
        if sharper is None:
            sharper = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return freq * (1 - divided) + freq / self.factor * divided, sharper


SCALINGS = Registry("rope scaling", {"linear": Linear, "llama3": Llama3, "yarn": Yarn})


class Rope(Settings):
    """Rotary positions."""

    base: float = Field(10_000.0, gt=1)
    """The slowest pair turns once in about 2 pi times this many tokens."""
    scaling: Annotated[Any, Choice(SCALINGS, tag="kind")] | None = None
    """How a longer context than the original is reached."""
    pairs: Literal["halves", "interleaved"] = "halves"
    """Feature i turns with i + H/2 (halves), or 2i with 2i + 1."""

    def frequencies(self, size: int) -> tuple[np.ndarray, float]:
        """Radians a token of each of the size/2 pairs, and the factor on cosine and sine."""
        freq = self.base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.scaling is None:
            return freq, 1.0
        return self.scaling.apply(freq, self.base)


def rotate(x: Float[Array, "B T N H"], at: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T N H"]:
    """Turns each pair of features by its position."""
    freq, factor = rope.frequencies(x.shape[-1])
    angle = at.astype(jnp.float32)[:, :, None, None] * jnp.asarray(freq, jnp.float32)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    y = x.astype(jnp.float32)
    if rope.pairs == "interleaved":
        a, b = y[..., 0::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    else:
        a, b = jnp.split(y, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.astype(x.dtype)
