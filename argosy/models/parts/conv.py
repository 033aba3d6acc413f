"""Convolutions over images [B H W C] and videos [B F H W C], and norms of their channels.

    y[h, w] = sum over p, q of x[s h + p - pad, s w + q - pad] W[p, q] + b        stride s

As in `Einsum`, the axes of a weight have names, by which sharding rules and optimizers select them. Group norm: Wu and He 2018
(arXiv:1803.08494).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.weight import Draw, Meaning, weight
from argosy.ops.precision import wide
from argosy.ops.video_convolution import convolve_video

LEGEND = (("P", "tap_rows"), ("Q", "tap_columns"), ("I", "channels_in"), ("O", "channels_out"), ("F", "tap_frames"))


class Conv(nnx.Module):
    """A convolution over images with an odd kernel size and zero padding.

    Args:
        inner: the number of input channels.
        outer: the number of output channels.
        taps: the kernel size in height and width.
        stride: the stride in height and width. The output has 1 / stride of the input's height and width.
        late: whether only the right and bottom edges are padded, as in the downsampling of Stable Diffusion's autoencoder.
        zero: whether the weights are initialized to zero.
    """

    def __init__(
        self, inner: int, outer: int, taps: int = 3, *, stride: int = 1, bias: bool = True, late: bool = False, zero: bool = False
    ):
        self.stride, self.padding = stride, (0, 1) if late else (taps // 2, taps // 2)
        draw = Draw("constant", 0.0) if zero else Draw("normal", (taps * taps * inner) ** -0.5)
        self.w = weight((taps, taps, inner, outer), Meaning("PQIO", "PQI", legend=LEGEND), draw)
        self.b = weight((outer,), Meaning("O", legend=LEGEND), Draw("constant", 0.0)) if bias else None

    def __call__(self, x: Float[Array, "B H W I"]) -> Float[Array, "B h w O"]:
        layout = ("NHWC", "HWIO", "NHWC")
        pads = (self.padding, self.padding)
        y = jax.lax.conv_general_dilated(x, self.w[...].astype(x.dtype), (self.stride,) * 2, pads, dimension_numbers=layout)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


class CausalConv(nnx.Module):
    """A causal convolution over videos. Height and width are zero-padded; time is not. An output frame depends on the input frame at
    the same time and the `frames` - 1 frames before it, which the caller must put in front of x.

    Args:
        inner: the number of input channels.
        outer: the number of output channels.
        taps: the kernel size in height and width, odd.
        frames: the kernel size in time.
    """

    def __init__(self, inner: int, outer: int, taps: int, frames: int, *, bias: bool = True):
        self.padding = (taps // 2, taps // 2)
        shape, fan_in = (frames, taps, taps, inner, outer), frames * taps * taps * inner
        self.w = weight(shape, Meaning("FPQIO", "FPQI", legend=LEGEND), Draw("normal", fan_in**-0.5))
        self.b = weight((outer,), Meaning("O", legend=LEGEND), Draw("constant", 0.0)) if bias else None

    def __call__(self, x: Float[Array, "B F H W I"], stride: int = 1) -> Float[Array, "B f H W O"]:
        """Convolves x. `stride` is the stride in time; height and width are unchanged."""
        y = convolve_video(x, self.w[...].astype(x.dtype), self.padding, stride)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


class ChannelNorm(nnx.Module):
    """Computes x sqrt(C) / |x| g over the channels of each position, in float32 at least. This is RMSNorm without an epsilon."""

    def __init__(self, channels: int):
        self.scale = weight((channels,), Meaning("I", legend=LEGEND), Draw("constant", 1.0))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        y = wide(x)
        # A position whose channels are all zero stays zero.
        size = jnp.sqrt(jnp.maximum(jnp.sum(y * y, -1, keepdims=True), 1e-24))
        return (y / size * y.shape[-1] ** 0.5 * self.scale[...].astype(y.dtype)).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Normalizes groups of channels over the whole image, in float32 at least. `groups` is the number of groups."""

    def __init__(self, channels: int, groups: int, eps: float = 1e-6):
        self.groups, self.eps = groups, eps
        self.scale = weight((channels,), Meaning("I", legend=LEGEND), Draw("constant", 1.0))
        self.b = weight((channels,), Meaning("I", legend=LEGEND), Draw("constant", 0.0))

    def __call__(self, x: Float[Array, "B H W I"]) -> Float[Array, "B H W I"]:
        B, H, W, C = x.shape
        y = wide(x).reshape(B, H, W, self.groups, C // self.groups)
        y = y - jnp.mean(y, (1, 2, 4), keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, (1, 2, 4), keepdims=True) + self.eps)
        y = y.reshape(B, H, W, C)
        return (y * self.scale[...].astype(y.dtype) + self.b[...].astype(y.dtype)).astype(x.dtype)


def twice(x: Float[Array, "B H W C"]) -> Float[Array, "B 2*H 2*W C"]:
    """Doubles the height and width of images by repeating each pixel (nearest-neighbor upsampling)."""
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
