"""CLIP with both towers against transformers: a small random model (tests/reference/images.py), from pictures to scores."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from safetensors.numpy import load_file

import argosy
from argosy.core.errors import BadInput, Damaged
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.models.clip_towers import ClipTowersConfig
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, parameter_count, variables
from argosy.observe.flops import contraction_flops
from argosy.weights.hub.image_steps import read_image_steps

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
GOLDEN, TOKENIZER = GOLDENS / "clip", GOLDENS / "pipeline-sd" / "tokenizer"
TOLERANCE = 1e-5  # of the largest number; 5e-7 was measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = write_model(GOLDEN, tmp_path_factory.mktemp("clip") / "clip")
    for file in TOKENIZER.iterdir():
        shutil.copyfile(file, target / file.name)
    return target


@pytest.fixture(scope="module")
def clip(folder):
    return argosy.load(folder)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "golden.npz"))


def pictures_of(golden: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [golden[f"picture_{i}"] for i in range(3)]


def test_vectors_and_scores_are_those_of_transformers(clip, golden):
    pixels = jnp.asarray(np.moveaxis(golden["out_pixels"], 1, -1))
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    assert relative(clip.module.vision.hidden(pixels), golden["out_hidden"]) < TOLERANCE
    assert relative(clip.module.images(pixels), golden["out_images"]) < TOLERANCE
    assert relative(clip.module.texts(tokens), golden["out_texts"]) < TOLERANCE
    assert relative(clip.module(pixels, tokens), golden["out_scores"]) < TOLERANCE


def test_pictures_are_prepared_as_by_transformers(clip, golden):
    """Of three sizes: the shorter side is resized by Pillow's bicubic filter, the middle is cropped, colors are normalized."""
    ready = np.stack([clip.steps(picture) for picture in pictures_of(golden)])
    np.testing.assert_allclose(np.moveaxis(ready, -1, 1), golden["out_pixels"], atol=1e-5)
    assert relative(clip.embed_images(pictures_of(golden)), golden["out_images"]) < TOLERANCE
    assert clip.scale == pytest.approx(float(np.exp(np.asarray(clip.module.scale[...]))))


def test_texts_are_embedded_and_scored(clip, golden):
    texts = ["a red fox in the snow", "nothing"]
    vectors, images = clip.embed(texts, normalize=True), clip.embed_images(pictures_of(golden), normalize=True)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(clip.scores(pictures_of(golden), texts), clip.scale * images @ vectors.T, rtol=1e-6)
    # Alone or beside a longer text: padding after the end of a text is not read.
    np.testing.assert_allclose(clip.embed(texts[1:], normalize=True)[0], vectors[1], atol=1e-6)


def test_it_is_written_as_it_was_read_and_read_again(folder, clip, golden, tmp_path):
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    theirs, ours = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "hub"))
    assert set(theirs) == set(ours)
    assert all(ours[n].shape == w.shape and (ours[n] == w).all() for n, w in theirs.items())
    for again in (tmp_path / "argosy", tmp_path / "hub"):
        assert argosy.load(again).config == clip.config
    again, pictures = argosy.load(tmp_path / "hub"), pictures_of(golden)
    np.testing.assert_array_equal(again.embed_images(pictures), clip.embed_images(pictures))
    clip.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (tmp_path / "hub" / "model.safetensors").read_bytes()


def test_folders_of_before_2023_are_read(folder, clip, tmp_path):
    """Their settings are in a second mapping for each tower, and some are their defaults."""
    old = shutil.copytree(folder, tmp_path / "old")
    config = json.loads((old / "config.json").read_text(encoding="utf-8"))
    for tower in ("text", "vision"):
        config[f"{tower}_config_dict"] = config[f"{tower}_config"] | {"pruned_heads": {}, "top_p": 1.0}
        config[f"{tower}_config"] = {"model_type": f"clip_{tower}_model"}
    (old / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert argosy.load(old).config == clip.config


@pytest.mark.parametrize("name", ClipTowersConfig.examples())
def test_counts_and_names_are_those_of_what_is_built(name):
    config = ClipTowersConfig.examples()[name]
    for run in (Unroll(), Scan()):
        assert parameter_count(abstract(config.build(run))) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(config.build(Unroll())))


def test_flops_are_those_of_a_trace(clip, golden):
    """One image with one text: the cosine is beside what is counted."""
    import jax

    pixels, tokens = jnp.zeros((1, 15, 15, 3)), jnp.asarray(golden["tokens"][:1], jnp.int32)
    traced = contraction_flops(jax.make_jaxpr(clip.module)(pixels, tokens).jaxpr)
    assert traced == clip.config.flops(tokens.shape[1]) + 2 * clip.config.embedding_width


def test_mistakes_are_named(folder, clip, tmp_path):
    with pytest.raises(BadInput, match="not one text"):
        clip.embed("a fox")
    with pytest.raises(BadInput, match=r"an image of \[4, 4\]"):
        clip.embed_images([np.zeros((4, 4), np.uint8)])
    with pytest.raises(BadInput, match=r"float32 from 0\.0 to 2\.0"):
        clip.embed_images([np.linspace(0, 2, 48, dtype=np.float32).reshape(4, 4, 3)])
    with pytest.raises(BadInput, match="predicts no tokens"):
        clip.check_predicts()
    with pytest.raises(BadInput, match="adapter: not built for CLIP"):
        argosy.load(folder, adapter=tmp_path)


def test_steps_that_are_not_built_are_named(tmp_path):
    def steps(**changes):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"crop_size": 15, "size": 15} | changes), encoding="utf-8")
        return read_image_steps(tmp_path, 15)

    assert steps(resample=2, image_mean=[0.5] * 3).resampling == "bilinear"
    assert steps(do_normalize=False).deviation == (1, 1, 1)
    with pytest.raises(BadInput, match="`resample` = 0"):
        steps(resample=0)
    with pytest.raises(BadInput, match="shortest_edge is"):
        steps(size={"height": 3, "width": 3})
    with pytest.raises(BadInput, match="16x16 pixels, and the model reads 15x15"):
        steps(crop_size={"height": 16, "width": 16})
    with pytest.raises(Damaged, match="image_std"):
        steps(image_std=[0, 0, 0])
    # As transformers 5 writes a processor of texts and images.
    (tmp_path / "preprocessor_config.json").unlink()
    whole = {"image_processor": {"crop_size": 15, "size": 15, "image_mean": [0.25] * 3}, "processor_class": "CLIPProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
    assert read_image_steps(tmp_path, 15).mean == (0.25,) * 3
