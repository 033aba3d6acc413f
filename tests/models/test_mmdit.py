"""Denoisers against diffusers: small random ones (tests/reference/images.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from safetensors.numpy import load_file

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.jobs.convert import convert
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.stack import Scan
from argosy.weights.build import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number
NAMES = ["flux-dev", "flux-schnell", "flux2-dev", "flux2-klein", "sd3", "sd3.5", "z-image", "wan", "unet-sd", "unet-xl", "dit"]


def channels_last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_diffusers(name: str, tmp_path: Path):
    """Both layouts of layers, on images that are not square."""
    folder = write_model(GOLDENS / name, tmp_path / name)
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    conditions = {key: jnp.asarray(golden[key]) for key in Conditions._fields if key in golden}
    for run in (None, Scan()):
        model = load_model(open_model(folder), run=run).module
        velocity = jax.jit(model)(channels_last(golden["latents"]), jnp.asarray(golden["timestep"]), Conditions(**conditions))
        expected = next(value for key, value in golden.items() if key.startswith("out_"))
        assert relative(velocity, channels_last(expected)) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_folder_to_argosy_to_folder_is_exact(name: str, tmp_path: Path):
    """Tensors bit for bit, under the names of diffusers' files; of config.json every key that it had."""
    folder = write_model(GOLDENS / name, tmp_path / name)
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    theirs, ours = load_file(folder / "model.safetensors"), load_file(tmp_path / "hub" / "diffusion_pytorch_model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all((ours[n] == w).all() for n, w in theirs.items())
    source_config, saved_config = (json.loads((at / "config.json").read_text(encoding="utf-8")) for at in (folder, tmp_path / "hub"))
    assert saved_config == source_config


def test_settings_that_are_not_built_are_named(tmp_path: Path):
    for name, key, value in (
        ("sd3", "qk_norm", "layer_norm"),
        ("sd3", "caption_projection_dim", 30),
        ("flux-dev", "patch_size", 2),
        ("flux-dev", "out_channels", 32),
        ("flux2-klein", "out_channels", 32),
        ("flux2-klein", "eps", 1e-5),
        ("z-image", "n_kv_heads", 1),
        ("z-image", "all_patch_size", [1, 2]),
        ("z-image", "siglip_feat_dim", 8),
        ("wan", "patch_size", [2, 2, 2]),
        ("wan", "out_channels", 3),
        ("wan", "image_dim", 12),
        ("wan", "added_kv_proj_dim", 12),
        ("wan", "qk_norm", "rms_norm"),
    ):
        folder = write_model(GOLDENS / name, tmp_path / f"{name}-{key}")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
        with pytest.raises(BadInput, match=key):
            open_model(folder)
