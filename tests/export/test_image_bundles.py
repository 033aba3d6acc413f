"""Bundles that draw images: those of the pipeline, and read without its modules."""

from pathlib import Path

import numpy as np
import pytest
from laws.families import built

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
HOW = {"flow": SamplerSettings(), "noise": SamplerSettings(name="euler_ancestral")}


@pytest.mark.parametrize("sampler", HOW)
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_bundle_draws_what_the_pipeline_draws(tmp_path: Path, sampler: str, latent: bool, guidance: float):
    autoencoder = built(AUTOENCODER, Unroll()) if latent else None
    defaults = ImageDefaults(3, guidance, (8, 12))
    pipe = ImagePipeline(built(CONFIG, Unroll()), ClassPrompts(4), HOW[sampler], defaults, autoencoder)
    pipe.exporter = export_images
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[1, 2])
    bundle = Bundle.open(tmp_path / "bundle")
    found = bundle.run({"labels": np.array([2, 0], np.int32), "seed": np.array([7, 8], np.int32)})["images"]
    expected = pipe.images(["2", "0"], seed=[7, 8])
    assert np.abs(np.asarray(found).astype(int) - expected).max() <= 1
    assert found.shape == (2, 8, 12, 3)


def test_a_size_that_the_model_cannot_draw_writes_nothing(tmp_path: Path):
    pipe = ImagePipeline(built(CONFIG, Unroll()), ClassPrompts(4), SamplerSettings(), ImageDefaults(3, 1.0, (8, 8)))
    with pytest.raises(BadInput, match="multiples of 2"):
        export_images(pipe, tmp_path / "bundle", size=9)
    assert not (tmp_path / "bundle").exists()
