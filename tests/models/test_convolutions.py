"""Convolutions over frames equal XLA's over volumes, whichever way a platform computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.models.parts import conv
from argosy.models.parts.weight import fill, merge, split
from argosy.ops.op import implementations
from argosy.ops.video_convolution import VIDEO_CONVOLUTION


@pytest.mark.parametrize("name", ["frames", "volumes"])
@pytest.mark.parametrize("taps, frames, stride", [(3, 3, 1), (1, 3, 2), (3, 1, 1)])
def test_frames_equal_a_volume(name, taps, frames, stride):
    module = conv.CausalConv(3, 5, taps, frames)
    fill(module, jax.random.key(0), addresses=lambda path: [path])
    graph, leaves = split(module)
    leaves["b"] = jnp.arange(5.0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 6, 7, 3)), jnp.float32)

    def ours(x, w):
        with implementations(video_convolution=name):
            return merge(graph, leaves | {"w": w})(x, stride)

    def volume(x, w):
        pads = ((0, 0), (taps // 2,) * 2, (taps // 2,) * 2)
        return leaves["b"] + jax.lax.conv_general_dilated(x, w, (stride, 1, 1), pads, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))

    w = leaves["w"]
    # One for each tap in time, or one.
    assert str(jax.make_jaxpr(ours)(x, w)).count("conv_general_dilated[") == (frames if name == "frames" else 1)
    for got, wanted in zip(*(jax.jit(jax.vjp(f, x, w)[1])(jnp.sin(volume(x, w))) for f in (ours, volume))):
        assert relative(got, wanted) < 1e-6
    assert relative(ours(x, w), volume(x, w)) < 1e-6


def test_frames_are_for_types_whose_sums_are_not_rounded():
    for dtype, name in ((jnp.float32, "frames"), (jnp.bfloat16, "volumes")):
        x, w = jax.ShapeDtypeStruct((1, 4, 6, 6, 3), dtype), jax.ShapeDtypeStruct((3, 3, 3, 3, 5), dtype)
        assert VIDEO_CONVOLUTION.choose(x, w, (1, 1), 1) is VIDEO_CONVOLUTION[name]
