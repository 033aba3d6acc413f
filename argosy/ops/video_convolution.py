"""Convolutions over the frames of videos, zeros outside each frame. Frames are not padded.

    volumes   XLA's convolution over volumes, everywhere
    frames    a sum over the taps in time of convolutions over images, which XLA has a kernel for on CPUs: 96 channels of 32 x 32 take
              23 ms of CPU instead of 50, and 71 instead of 206 with gradients (docs/log)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.ops.op import Implementation, Op
from argosy.ops.precision import sums_in


def convolve_video(
    x: Float[Array, "B F H W I"], w: Float[Array, "taps P Q I O"], padding: tuple[int, int], stride: int = 1
) -> Float[Array, "B f H W O"]:
    """The convolution of videos by a kernel of `taps` frames.

    Args:
        padding: zeros before and after each frame, in height and width.
        stride: the number of frames is divided by it.
    """
    return VIDEO_CONVOLUTION.choose(x, w, padding, stride).run(x, w, padding, stride)


def _volumes(x: Array, w: Array, padding: tuple[int, int], stride: int) -> Array:
    pads = ((0, 0), padding, padding)
    return jax.lax.conv_general_dilated(x, w, (stride, 1, 1), pads, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def _frames(x: Array, w: Array, padding: tuple[int, int], stride: int) -> Array:
    B, count = x.shape[0], (x.shape[1] - w.shape[0]) // stride + 1
    last = stride * (count - 1) + 1
    y = jnp.zeros((B * count, *x.shape[2:4], w.shape[-1]), x.dtype)
    for tap in range(w.shape[0]):
        images = x[:, tap : tap + last : stride].reshape(B * count, *x.shape[2:])
        y = y + jax.lax.conv_general_dilated(images, w[tap], (1, 1), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y.reshape(B, count, *y.shape[1:])


def _frames_refusal(x: Any, *_: Any) -> str | None:
    return None if sums_in(x.dtype) == x.dtype else "sums in this type would be rounded at each tap"


VIDEO_CONVOLUTION = Op("video_convolution", "convolution of videos", prefer={"cpu": ("frames",)}, default="volumes")
VIDEO_CONVOLUTION.add("volumes", Implementation(_volumes))
VIDEO_CONVOLUTION.add("frames", Implementation(_frames, _frames_refusal))
