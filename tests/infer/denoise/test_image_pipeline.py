"""Images from prompts: seeds, batches, sizes, images to begin from, and what is refused."""

from functools import partial
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from laws.families import noisy_model

from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.autoencoders.autoencoder_kl import AutoencoderKLConfig
from argosy.models.diffusion.dit import DiTConfig
from argosy.models.parts.stack import Unroll

CONFIG = DiTConfig(channels=3, size=8, patch=2, width=24, layers=2, heads=3, classes=4, waves=8)
AUTOENCODER = AutoencoderKLConfig(widths=(4, 6), groups=2, latent_channels=3, scale=0.5, shift=0.1)


@pytest.fixture(scope="module")
def pipe() -> ImagePipeline:
    prompts = ClassPrompts(CONFIG.classes, ["cat", "dog", "fox", "owl"])
    return ImagePipeline(noisy_model(CONFIG, Unroll()), prompts, SamplerSettings(), ImageDefaults(4, 2.0, (8, 8)))


@pytest.fixture(scope="module")
def latent(pipe: ImagePipeline) -> ImagePipeline:
    return ImagePipeline(pipe.denoiser, pipe.prompts, pipe.sampler, ImageDefaults(3, 1.0, (16, 16)), noisy_model(AUTOENCODER, Unroll()))


def test_images_are_what_the_equations_say(pipe: ImagePipeline):
    noise = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    images = pipe.images(["fox", "1"], latents=noise, output="latents", guidance=3.0)
    x = jnp.asarray(noise.transpose(0, 2, 3, 1))
    sigmas = np.append(np.linspace(1, 1 / 1000, 4), 0)
    for now, to in pairwise(sigmas):
        times = jnp.full(2, 1000 * now, jnp.float32)
        with_class, without = (pipe.denoiser(x, times, pipe.prompts.encode(texts)) for texts in (["fox", "dog"], ["", ""]))
        x = x + (to - now) * (without + 3 * (with_class - without))
    np.testing.assert_allclose(images, x, atol=1e-4)


def test_an_image_depends_on_its_seed_and_number_alone(pipe: ImagePipeline):
    alone = pipe.images("fox", seed=5, n=3, output="float")
    batch = pipe.images(["cat", "fox", "owl"], seed=[1, 5, 2], n=3, output="float")
    np.testing.assert_allclose(batch[3:6], alone, atol=1e-5)
    one_by_one = pipe.images("fox", seed=5, n=3, output="float", batch=1)
    np.testing.assert_allclose(one_by_one, alone, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 0.01, "images of one prompt differ"
    again, other = pipe.images("fox", seed=5), pipe.images("fox", seed=6)
    np.testing.assert_array_equal(pipe.images("fox", seed=5), again)
    assert (again != other).any()
    assert again.dtype == np.uint8
    assert again.shape == (1, 8, 8, 3)


def test_step_by_step_is_at_once_and_progress_is_told(pipe: ImagePipeline):
    sampler = SamplerSettings(name="heun")
    seen: list[tuple[int, int]] = []
    slow = pipe.images("cat", sampler=sampler, output="float", progress=lambda i, n: seen.append((i, n)))
    np.testing.assert_allclose(slow, pipe.images("cat", sampler=sampler, output="float"), atol=1e-5)
    assert seen == [(i + 1, 7) for i in range(7)]


def test_one_program_serves_any_number_of_steps_and_scale(pipe: ImagePipeline, compilations: list[str]):
    pipe.images("cat", steps=2)
    compilations.clear()
    for steps, guidance in ((3, 2.5), (16, 9.0)):
        pipe.images("dog", steps=steps, guidance=guidance, seed=steps)
    assert compilations == []


def test_guidance_of_1_and_a_negative_prompt(pipe: ImagePipeline):
    plain, guided, led = (pipe.images("cat", output="float", **k) for k in ({"guidance": 1.0}, {}, {"negative": "dog"}))
    assert np.abs(plain - guided).max() > 1e-3
    assert np.abs(led - guided).max() > 1e-3
    same = pipe.images("cat", output="float", negative="cat", guidance=5.0)
    np.testing.assert_allclose(same, plain, atol=1e-4)


def test_images_begin_from_an_image(latent: ImagePipeline):
    image = np.random.default_rng(1).integers(0, 255, (1, 16, 16, 3), np.uint8)
    draw = partial(latent.images, "cat", image=image, output="latents", steps=20)
    start = latent.encode(image / np.float32(255))
    near, far = (np.abs(draw(strength=s) - start).mean() for s in (0.1, 1.0))
    assert near < far / 3
    mask = np.zeros((16, 16))
    mask[:8] = 1
    images = draw(mask=mask)
    np.testing.assert_allclose(images[:, 4:], start[:, 4:], atol=1e-5)
    assert np.abs(images[:, :4] - start[:, :4]).max() > 0.1
    assert latent.images("cat", image=image, mask=mask).shape == (1, 16, 16, 3)


def test_latents_are_decoded(latent: ImagePipeline):
    latents = latent.images(["cat", "dog"], output="latents")
    assert latents.shape == (2, 8, 8, 3)
    images = latent.images(["cat", "dog"], output="float")
    expected = latent.autoencoder.decode(jnp.asarray(latents) / 0.5 + 0.1)
    np.testing.assert_allclose(images, np.clip(np.asarray(expected) / 2 + 0.5, 0, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"size": 9}, "multiples of 2"),
        ({"size": (8, 0)}, "multiples of 2"),
        ({"steps": 0}, "at least 1"),
        ({"n": 0}, "at least 1"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"negative": ["a", "b"]}, "2 negative prompts"),
        ({"latents": np.zeros((1, 8, 8, 3))}, r"\[N C H W\]"),
        ({"mask": np.zeros((8, 8))}, "without an image"),
        ({"image": np.zeros((4, 4, 3))}, r"\[N H W 3\]"),
        ({"image": np.zeros((8, 8, 3)), "strength": 0.0}, "strength"),
        ({"sampler": SamplerSettings(name="ddim", noise={"kind": "betas"}, prediction="epsilon")}, "this model predicts velocity"),
    ],
)
def test_what_does_not_fit_is_refused(pipe: ImagePipeline, keys: dict, complaint: str):
    with pytest.raises(BadInput, match=complaint):
        pipe.images("cat", **keys)


def test_a_prompt_that_is_no_class_names_the_nearest(pipe: ImagePipeline):
    with pytest.raises(BadInput) as caught:
        pipe.images("foxy")
    assert "fox" in str(caught.value.hint)
    with pytest.raises(BadInput, match="no class"):
        pipe.images("4")


def test_numbers_that_are_not_finite_name_their_stage(latent: ImagePipeline):
    broken = noisy_model(CONFIG, Unroll())
    broken.head.b[...] = jnp.full_like(broken.head.b[...], jnp.nan)
    with pytest.raises(ArgosyError, match="the denoiser gave numbers"):
        ImagePipeline(broken, latent.prompts, latent.sampler, ImageDefaults(2, 1.0, (8, 8))).images("cat")
    blind = noisy_model(AUTOENCODER, Unroll())
    blind.decoder.conv_out.b[...] = jnp.full_like(blind.decoder.conv_out.b[...], jnp.inf)
    with pytest.raises(ArgosyError, match="decoder gave numbers"):
        ImagePipeline(latent.denoiser, latent.prompts, latent.sampler, latent.defaults, blind).images("cat")
