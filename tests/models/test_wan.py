"""Wan on videos: frames, and sequences that are split over devices. tests/models/test_mmdit.py compares it with diffusers."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import relative

from argosy.infer.denoise.step_cache import cached_prediction, fresh_memory
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.wan import WanConfig
from argosy.models.parts.stack import Scan
from argosy.models.parts.weight import merge, split
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from argosy.weights.build import random_model


def noisy(config: WanConfig, run: object = None) -> object:
    """The model with noise on every weight: untouched, its output is zero."""
    graph, leaves = split(random_model(config, 0, run=run).module)
    draw = np.random.default_rng(3)
    return merge(graph, {a: w + jnp.asarray(draw.normal(0, 0.2, w.shape), w.dtype) for a, w in sorted(leaves.items())})


def video(frames: int, rows: int = 2) -> tuple[jax.Array, jax.Array, Conditions]:
    draw = np.random.default_rng(1)
    latents = jnp.asarray(draw.normal(size=(rows, frames, 4, 8, 3)), jnp.float32)
    return latents, jnp.linspace(20.0, 900.0, rows), Conditions(text=jnp.asarray(draw.normal(size=(rows, 5, 10)), jnp.float32))


def test_an_image_is_a_video_of_one_frame_and_frames_see_each_other():
    model = jax.jit(noisy(WanConfig.examples()["plain"]))
    latents, *rest = video(3)
    whole = model(latents, *rest)
    assert whole.shape == latents.shape
    np.testing.assert_allclose(model(latents[:, 0], *rest), model(latents[:, :1], *rest)[:, 0], atol=1e-6)
    other = model(latents.at[:, 2].add(1.0), *rest)
    assert relative(other[:, 0], whole[:, 0]) > 1e-4
    # Frames have places: turned around, they do not give the same turned around.
    assert relative(model(latents[:, ::-1], *rest)[:, ::-1], whole) > 1e-4


def test_steps_of_a_video_are_cached():
    """At a threshold that nothing exceeds, the layers after the first run once."""
    model = noisy(WanConfig.examples()["plain"])
    latents, times, conditions = video(3)
    memory = fresh_memory(model, latents, times, conditions, 1e6)
    first, memory = cached_prediction(model, latents, times, conditions, memory)
    assert relative(first, model(latents, times, conditions)) < 2e-5
    other, memory = cached_prediction(model, latents, times - 10, conditions, memory)
    assert (other.shape, int(memory.runs)) == (latents.shape, 1)
    assert 1e-6 < relative(other, model(latents, times - 10, conditions)) < 1


def test_a_video_that_is_split_over_devices_is_the_same():
    """`mesh.context`: attention to the video goes round the devices, attention to the text needs no keys of others."""
    inputs = video(4, rows=4)
    model = noisy(WanConfig.examples()["plain"], Scan())
    expected = jax.jit(model)(*inputs)
    graph, leaves = split(model)
    with scope(MeshSettings(data=1, fsdp=2, context=4).build()):
        program = jax.jit(lambda leaves, inputs: merge(graph, leaves)(*inputs)).lower(leaves, inputs).compile()
        assert relative(program(leaves, inputs), expected) < 1e-5
    assert "collective-permute" in program.as_text()
