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
from argosy.ops.precision import sums_in, wide
from argosy.parallel.scope import platform

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
        w = self.w[...].astype(x.dtype)
        # Sums in bfloat16 would be rounded at each tap.
        by_frames = platform() == "cpu" and sums_in(x.dtype) == x.dtype
        y = (_by_frames if by_frames else _by_volumes)(x, w, self.padding, stride)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


def _by_volumes(x: Array, w: Array, padding: tuple[int, int], stride: int) -> Float[Array, "B f H W O"]:
    pads = ((0, 0), padding, padding)
    return jax.lax.conv_general_dilated(x, w, (stride, 1, 1), pads, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def _by_frames(x: Array, w: Array, padding: tuple[int, int], stride: int) -> Float[Array, "B f H W O"]:
    """The same as a sum over the taps in time of convolutions over images, which XLA has a kernel for on CPUs: 96 channels of 32 x 32
    take 23 ms instead of 50, and 71 instead of 206 with gradients."""
    B, count = x.shape[0], (x.shape[1] - w.shape[0]) // stride + 1
    last = stride * (count - 1) + 1
    layout = ("NHWC", "HWIO", "NHWC")
    y = jnp.zeros((B * count, *x.shape[2:4], w.shape[-1]), x.dtype)
    for tap in range(w.shape[0]):
        images = x[:, tap : tap + last : stride].reshape(B * count, *x.shape[2:])
        y = y + jax.lax.conv_general_dilated(images, w[tap], (1, 1), (padding, padding), dimension_numbers=layout)
    return y.reshape(B, count, *y.shape[1:])


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
