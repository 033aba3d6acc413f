"""Norms. They are always computed in float32 at least, because a mean of squares in bfloat16 has only two correct digits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.core.dims import Legend
from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.ops.precision import wide


class RMSNorm(nnx.Module):
    """x / rms(x) * (scale + offset). Zhang and Sennrich 2019 (arXiv:1910.07467).

    Args:
        width: the size of the last axis of x, or the sizes of the last axes that are normalized together.
        offset: is added to the stored scale. With 1 the weight stores scale - 1 and starts at 0 (Gemma, Qwen3-Next).
        letters, legend: the letters of the normalized axes, as in `Einsum`.
    """

    def __init__(
        self, width: int | tuple[int, ...], eps: float = 1e-6, offset: float = 0.0, letters: str = "D", legend: Legend = ()
    ):
        shape = (width,) if isinstance(width, int) else width
        assert len(shape) == len(letters), f"{shape} as {letters}"
        self.eps, self.offset, self.axes = eps, offset, tuple(range(-len(shape), 0))
        self.scale = weight(shape, Meaning(letters, legend=legend), Draw("constant", 1.0 - offset))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = rms_normalize(wide(x), self.eps, self.axes)
        return (y * (self.scale[...].astype(y.dtype) + self.offset)).astype(x.dtype)


def rms_normalize(x: Float[Array, "..."], eps: float, axes: tuple[int, ...] = (-1,)) -> Float[Array, "..."]:
    """Returns x / rms(x), in the dtype of x: RMSNorm without a weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias. Ba et al. 2016 (arXiv:1607.06450).

    Args:
        width: the size of the last axis of x, which is normalized.
        letters: the letter of that axis.
        kind: the class of the weights. `SelectionWeight` if the norm's output only selects something and is never trained.
    """

    def __init__(self, width: int, eps: float = 1e-5, letters: str = "D", kind: type[nnx.Variable] = nnx.Param):
        self.eps = eps
        self.scale = weight((width,), Meaning(letters), Draw("constant", 1.0), kind)
        self.b = weight((width,), Meaning(letters), Draw("constant", 0.0), kind)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = wide(x)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * self.scale[...].astype(y.dtype) + self.b[...].astype(y.dtype)).astype(x.dtype)
