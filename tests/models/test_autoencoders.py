"""Autoencoders against diffusers: small random ones (tests/reference/images.py), and TAEF2 as it was trained."""

import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative, shared
from safetensors.numpy import load_file, save_file

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.models import FAMILIES
from argosy.models.parts.weight import abstract, parameter_count, variables
from argosy.observe.flops import contraction_flops
from argosy.weights.build import load_model, random_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number; 1e-6 was measured
CASES = {
    f"{family}-{name}": config
    for family in ("autoencoder_kl", "autoencoder_kl_flux2", "autoencoder_kl_wan", "autoencoder_tiny")
    for name, config in FAMILIES[family].examples().items()
}
each = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def channels_last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


@pytest.mark.parametrize("name", ["vae-sd", "vae-flux", "vae-flux2", "vae-tiny"])
def test_it_is_that_of_diffusers(name: str, tmp_path: Path):
    model = load_model(open_model(write_model(GOLDENS / name, tmp_path / name))).module
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    encoded = model.encode(channels_last(golden["images"]))
    if name == "vae-tiny":
        assert relative(encoded, channels_last(golden["out_latents"])) < TOLERANCE
    else:
        assert relative(encoded.mean, channels_last(golden["out_mean"])) < TOLERANCE
        assert relative(encoded.log_variance, channels_last(golden["out_logvar"])) < TOLERANCE
    images = model.decode(channels_last(golden["latents"]))
    assert relative(images, channels_last(golden["out_images"])) < TOLERANCE
    if name == "vae-flux2":
        assert relative(model.to_latents(encoded), channels_last(golden["out_packed"])) < TOLERANCE
        unpacked = model.decode(model.from_latents(channels_last(golden["packed"])))
        assert relative(unpacked, channels_last(golden["out_unpacked"])) < TOLERANCE


def test_the_one_of_wan_is_that_of_diffusers(tmp_path: Path):
    """An image and a video: diffusers goes frame by frame, and keeps what convolutions read."""
    model = load_model(open_model(write_model(GOLDENS / "vae-wan", tmp_path / "vae-wan"))).module
    golden = dict(np.load(GOLDENS / "vae-wan" / "golden.npz"))
    for name in ("image", "video"):
        encoded = jax.jit(model.encode)(channels_last(golden[name]))
        assert relative(encoded.mean, channels_last(golden[f"out_{name}_mean"])) < TOLERANCE
        assert relative(encoded.log_variance, channels_last(golden[f"out_{name}_logvar"])) < TOLERANCE
    latents, decode = channels_last(golden["latents"]), jax.jit(model.decode)
    for inputs, name in ((latents[:, 0], "images"), (latents, "videos")):
        expected = channels_last(golden[f"out_{name}"])
        expected = expected[:, 0] if name == "images" else expected
        assert (np.abs(expected) < 1).mean() > 0.3
        assert relative(jnp.clip(decode(inputs), -1, 1), expected) < TOLERANCE
    with pytest.raises(ValueError, match="8 frames: a multiple of 4, and one more"):
        model.encode(channels_last(golden["video"])[:, :8])
    normalized = model.to_latents(encoded)
    mean, deviation = np.array([-0.3, 0.2, 0.1, -0.6]), np.array([1.5, 0.8, 2.2, 1.1])
    np.testing.assert_allclose(normalized, (np.asarray(encoded.mean) - mean) / deviation, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.from_latents(normalized), encoded.mean, atol=1e-5)


def test_scales_and_shifts_are_those_of_flux(tmp_path: Path):
    """The pipeline of diffusers reads (latents / scaling_factor) + shift_factor."""
    model = load_model(open_model(write_model(GOLDENS / "vae-flux", tmp_path / "vae"))).module
    latents = jnp.linspace(-2.0, 2.0, 12).reshape(1, 1, 2, 6)
    np.testing.assert_allclose(model.from_latents(latents), np.asarray(latents) / 0.3611 + 0.1159, rtol=1e-6)
    moments = model.encode(jnp.zeros((1, 4, 4, 3)))
    np.testing.assert_allclose(model.from_latents(model.to_latents(moments)), moments.mean, atol=1e-6)
    noisy = model.to_latents(moments, jnp.ones_like(moments.mean))
    expected = (moments.mean + np.exp(np.asarray(moments.log_variance) / 2) - 0.1159) * 0.3611
    np.testing.assert_allclose(noisy, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["vae-sd", "vae-flux", "vae-flux2", "vae-wan", "vae-tiny"])
def test_folder_to_argosy_to_folder_is_exact(name: str, tmp_path: Path):
    """Tensors bit for bit, under the names of diffusers' files; of config.json every key that it had."""
    folder = write_model(GOLDENS / name, tmp_path / name)
    (folder / "model.safetensors").rename(folder / "diffusion_pytorch_model.safetensors")
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    theirs, ours = (load_file(at / "diffusion_pytorch_model.safetensors") for at in (folder, tmp_path / "hub"))
    assert theirs.keys() == ours.keys()
    assert all((ours[n] == w).all() for n, w in theirs.items())
    source_config, saved_config = (json.loads((at / "config.json").read_text(encoding="utf-8")) for at in (folder, tmp_path / "hub"))
    assert source_config == saved_config


@pytest.mark.parametrize(("image", "floor"), [("china", 1e-3), ("flower", 1e-3)])
def test_taef2_as_it_was_trained(image: str, floor: float):
    """Latents of a photo to the goldens' 16 bits, and the photo again at the quality that the reference has."""
    folder = shared("models/taef2")
    golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))["cases"][image]
    model = load_model(open_model(folder)).module
    assert model.config.pools
    photo = png_pixels((folder.parents[1] / golden["image"]).read_bytes()).astype(np.float32) / 255
    latents = jax.jit(model.encode)(jnp.asarray(2 * photo[None] - 1))
    stored = np.load(folder / f"latent_{image}.npz")
    expected = channels_last(stored[stored.files[0]].astype(np.float32).reshape(golden["latent_shape"]))
    assert relative(latents, expected) < floor
    again = np.asarray(jax.jit(model.decode)(latents))[0] / 2 + 0.5
    psnr = -10 * np.log10(np.mean((np.clip(again, 0, 1) - photo) ** 2))
    assert abs(psnr - next(value for key, value in golden.items() if "psnr" in key)) < 0.02


def png_pixels(data: bytes) -> np.ndarray:
    """The pixels of an RGB image of 8 bits: what the format's specification says, and no more."""
    at, packed, size = 8, b"", (0, 0)
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            size = int.from_bytes(body[4:8], "big"), int.from_bytes(body[:4], "big")
            assert body[8:13] == bytes([8, 2, 0, 0, 0])
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size[0], 1 + 3 * size[1])
    out = np.zeros((size[0] + 1, 3 * size[1] + 3), np.int64)
    for y, (filter_type, *line) in enumerate(raw.tolist(), 1):
        for x, value in enumerate(line, 3):
            left_pixel, up, corner = out[y, x - 3], out[y - 1, x], out[y - 1, x - 3]
            guess = left_pixel + up - corner
            near = min((abs(guess - neighbor), i, neighbor) for i, neighbor in enumerate((left_pixel, up, corner)))[2]
            out[y, x] = (value + (0, left_pixel, up, (left_pixel + up) // 2, near)[filter_type]) % 256
    return out[1:, 3:].reshape(*size, 3).astype(np.uint8)


@each
def test_counts_and_names_are_those_of_what_is_built(config):
    model = random_model(config, 0).module
    assert parameter_count(abstract(model)) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(model))
    images = jnp.zeros((1, 8, 12, config.channels))
    assert contraction_flops(jax.make_jaxpr(model)(images).jaxpr) == config.flops(8 * 12)
    assert model(images).shape == images.shape


def test_parts_that_are_not_built_are_named(tmp_path: Path):
    folder = write_model(GOLDENS / "vae-sd", tmp_path / "vae")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value, problem in (
        ("up_block_types", ["AttnUpDecoderBlock2D"] * 3, "AttnUpDecoderBlock2D"),
        ("latents_mean", [0.1] * 4, "latents_mean"),
        ("_class_name", "AutoencoderKLCosmos", "AutoencoderKLCosmos"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
        with pytest.raises(BadInput, match=problem):
            open_model(folder)


def test_names_of_attention_before_2023_are_read(tmp_path: Path):
    folder = write_model(GOLDENS / "vae-sd", tmp_path / "vae")
    new = open_model(folder).weights
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        *way, last, end = name.replace("to_out.0", "to_out").rsplit(".", 2)
        last = {"to_out": "to_out.0"}.get(last, last)
        tensors[".".join([*way, old.get(last, last), end])] = value
    assert any(".query." in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    again = open_model(folder).weights
    assert all((again.read(n) == new.read(n)).all() for n in new.names)
