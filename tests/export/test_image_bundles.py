"""Bundles that draw images: those of the pipeline, and read without its modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_weights import write_pipeline
from laws.families import noisy_model

import argosy
from argosy.core.errors import BadInput
from argosy.export.bundle import Bundle
from argosy.export.images import export_images
from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.autoencoders.autoencoder_kl import AutoencoderKLConfig
from argosy.models.diffusion.dit import DiTConfig
from argosy.models.parts.stack import Unroll

CONFIG = DiTConfig(channels=3, size=8, patch=2, width=24, layers=2, heads=3, classes=4, waves=8)
AUTOENCODER = AutoencoderKLConfig(widths=(4, 6), groups=2, latent_channels=3, scale=0.5, shift=0.1)
GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
FAST, SLOW = "z-image", ("sd", "sdxl", "sd3", "flux", "flux2", "flux2-dev", "wan")
UNGUIDED = ("flux", "flux2-dev")
# The small Wan of the goldens hardly follows its prompts.
GUIDANCE = {"wan": 100.0}
HOW = {"flow": SamplerSettings(), "noise": SamplerSettings(name="euler_ancestral")}


@pytest.mark.parametrize("sampler", HOW)
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_bundle_draws_what_the_pipeline_draws(tmp_path: Path, sampler: str, latent: bool, guidance: float):
    autoencoder = noisy_model(AUTOENCODER, Unroll()) if latent else None
    defaults = ImageDefaults(3, guidance, (8, 12))
    pipe = ImagePipeline(noisy_model(CONFIG, Unroll()), ClassPrompts(4), HOW[sampler], defaults, autoencoder)
    pipe.exporter = export_images
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[1, 2])
    bundle = Bundle.open(tmp_path / "bundle")
    images = bundle.run({"labels": np.array([2, 0], np.int32), "seed": np.array([7, 2**32 - 1], np.uint32)})["images"]
    expected = pipe.images(["2", "0"], seed=[7, 2**32 - 1])
    assert np.abs(np.asarray(images).astype(int) - expected).max() <= 1
    assert images.shape == (2, 8, 12, 3)


@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_bundle_reads_prompts_as_its_pipeline(tmp_path: Path, name: str):
    """Prompts of different lengths in one batch, with negative prompts and without, by every kind of pipeline of diffusers."""
    pipe = argosy.load(write_pipeline(GOLDENS / f"pipeline-{name}", tmp_path / "pipeline"))
    options: dict[str, Any] = {"steps": 2, "size": 32 if name == "sdxl" else 16}
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[2], **options)
    options["guidance"] = GUIDANCE.get(name, pipe.defaults.guidance)
    bundle = Bundle.open(tmp_path / "bundle")
    prompts, seeds = ["a red fox in the snow", "nothing"], [2**31 + 5, 3]
    negatives: list[Any] = [None]
    if "negative_prompt" in [step.input for step in bundle.manifest.signatures["denoise"].preprocess]:
        negatives.append(["snow", "a fox"])
    for negative in negatives:
        inputs: dict[str, Any] = {"prompt": prompts, "seed": seeds, "guidance": [options["guidance"]] * 2}
        inputs |= {} if negative is None else {"negative_prompt": negative}
        images = np.asarray(bundle.run(inputs)["images"]).astype(int)
        expected = pipe.images(prompts, negative=negative, seed=seeds, **options).astype(int)
        assert np.abs(images - expected).max() <= 1
        # Prompts are seen in what is drawn.
        assert np.abs(images - pipe.images(prompts[::-1], negative=negative, seed=seeds, **options)).max() > 1
    assert len(negatives) == (1 if name in UNGUIDED else 2)


def test_a_template_that_trims_prompts_is_not_in_bundles(tmp_path: Path):
    """The tokenizers of a bundle stand affixes around a prompt, and do no more with it."""
    folder = write_pipeline(GOLDENS / "pipeline-z-image", tmp_path / "pipeline")
    template = folder / "tokenizer" / "chat_template.jinja"
    changed = template.read_text(encoding="utf-8").replace("m.content", "m.content | trim")
    template.write_text(changed, encoding="utf-8")
    assert "| trim" in changed
    with pytest.raises(BadInput, match="more with a prompt than to stand around it"):
        argosy.load(folder).export(tmp_path / "bundle", platforms=["cpu"], batch=[1], steps=1, size=16)
    assert not (tmp_path / "bundle").exists()


def test_a_size_that_the_model_cannot_draw_writes_nothing(tmp_path: Path):
    pipe = ImagePipeline(noisy_model(CONFIG, Unroll()), ClassPrompts(4), SamplerSettings(), ImageDefaults(3, 1.0, (8, 8)))
    with pytest.raises(BadInput, match="multiples of 2"):
        export_images(pipe, tmp_path / "bundle", size=9)
    assert not (tmp_path / "bundle").exists()
