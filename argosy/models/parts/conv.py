"""Convolutions over images [B H W C] and videos [B F H W C], and norms of their channels.

    y[h, w] = sum over taps p, q of x[s h + p - pad, s w + q - pad] W[p, q] + b

A weight's axes have names, as those of `Einsum` have: sharding and optimizers ask for them. Group norm: Wu and He 2018
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
    """A convolution with an odd number of taps in each direction, zeros outside the image.

    Args:
        stride: height and width are divided by it.
        late: pads on the right and below only, as the down-sampling of Stable Diffusion's autoencoder does.
        zero: its weights begin at zero.
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
    """A convolution over the frames of videos, zeros outside each frame. Frames are not padded: of `frames` taps, the last is on the
    frame itself, so whoever calls it gives the frames before it too.

    Args:
        taps: of the kernel in height and width, odd.
        frames: of the kernel in time.
    """

    def __init__(self, inner: int, outer: int, taps: int, frames: int, *, bias: bool = True):
        self.padding = (taps // 2, taps // 2)
        shape, fan_in = (frames, taps, taps, inner, outer), frames * taps * taps * inner
        self.w = weight(shape, Meaning("FPQIO", "FPQI", legend=LEGEND), Draw("normal", fan_in**-0.5))
        self.b = weight((outer,), Meaning("O", legend=LEGEND), Draw("constant", 0.0)) if bias else None

    def __call__(self, x: Float[Array, "B F H W I"], stride: int = 1) -> Float[Array, "B f H W O"]:
        """stride: the number of frames is divided by it."""
        y = convolve_video(x, self.w[...].astype(x.dtype), self.padding, stride)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


class ChannelNorm(nnx.Module):
    """x sqrt(C) / |x| g over the channels of each position, in float32 at least: RMSNorm that adds nothing to the mean square."""

    def __init__(self, channels: int):
        self.scale = weight((channels,), Meaning("I", legend=LEGEND), Draw("constant", 1.0))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        y = wide(x)
        # A position of zeros stays zeros.
        size = jnp.sqrt(jnp.maximum(jnp.sum(y * y, -1, keepdims=True), 1e-24))
        return (y / size * y.shape[-1] ** 0.5 * self.scale[...].astype(y.dtype)).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Normalizes groups of channels over the whole image, in float32 at least."""

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
    """The image at twice its size, each pixel repeated."""
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
