"""Convolutions over videos. Height and width are zero-padded; time is not padded.

    volumes   XLA's convolution over volumes, on every platform
    frames    a sum of convolutions over images, one for each time step of the kernel. XLA has a kernel for these on CPUs: 96 channels
              of 32 x 32 take 23 ms of CPU time instead of 50, and 71 ms instead of 206 with gradients (docs/log)
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
    """Convolves videos with a kernel of `taps` frames and P x Q pixels.

    Args:
        padding: the number of zeros before and after each frame, in both height and width.
        stride: the stride in time.
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
