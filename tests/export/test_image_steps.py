"""Image files as inputs of bundles: pixels against Pillow and by hand, and what is refused."""

import base64
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

import argosy
from argosy.core.errors import BadInput
from argosy.core.formats.image_files import image_file, read_image
from argosy.export.bundle import Bundle
from argosy.export.steps import DecodeImageStep, LabelsStep, ProbabilitiesStep, decoded_images
from argosy.jobs.bundle import run_bundle

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (6, 8, 3), np.uint8)


def decode(file, dtype=np.float32, **settings):
    return decoded_images(DecodeImageStep(**{"height": 6, "width": 8} | settings), file, np.dtype(dtype))


def test_pixels_are_those_of_preprocessors_in_transformers():
    """(x / 255 - mean) / std, channels first."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    pixels = decode([image_file(PICTURE)], layout="CHW", image_mean=mean, image_std=std)
    expected = ((PICTURE / 255 - mean) / std).transpose(2, 0, 1)[None]
    np.testing.assert_allclose(pixels, expected, atol=1e-6)
    assert pixels.dtype == np.float32


def test_base64_and_data_urls_are_bytes():
    data = image_file(PICTURE)
    text = base64.b64encode(data).decode()
    for file in (data, text, f"data:image/png;base64,{text}"):
        np.testing.assert_array_equal(decode(file, np.uint8, rescale_factor=1)[0], PICTURE)


def test_opacity_is_blended_or_ignored():
    """Where it is ignored, a file that is resized has the colors of the opaque one."""
    clear = np.concatenate([PICTURE, RNG.integers(0, 256, (6, 8, 1), np.uint8)], -1)
    how = {"height": 3, "width": 5, "resize": "stretch", "rescale_factor": 1}
    opaque = decode([image_file(PICTURE)], np.uint8, **how)
    np.testing.assert_array_equal(decode([image_file(clear)], np.uint8, transparency="ignore", **how), opaque)
    assert np.abs(decode([image_file(clear)], np.uint8, **how).astype(int) - opaque).max() > 20
    # Manifests of steps that blend have the text that they had before there was a choice.
    assert "transparency" not in DecodeImageStep(height=3, width=5).model_dump_json()
    assert DecodeImageStep(**DecodeImageStep(transparency="ignore", **how).model_dump()).transparency == "ignore"


def test_equal_files_are_decoded_once(monkeypatch):
    calls = []

    def counted(data):
        calls.append(len(data))
        return read_image(data)

    monkeypatch.setattr("argosy.export.steps.read_image", counted)
    files = [image_file(PICTURE), image_file(PICTURE[::-1])]
    pixels = decode([files[0], files[1], base64.b64encode(files[0]).decode(), files[0]], np.uint8, rescale_factor=1)
    np.testing.assert_array_equal(pixels, np.stack([PICTURE, PICTURE[::-1], PICTURE, PICTURE]))
    assert len(calls) == 2


@pytest.mark.parametrize("layout", ["HW", "HWC"])
def test_gray_is_pillows_to_a_level(layout):
    pixels = decode([image_file(PICTURE)], np.uint8, rescale_factor=1, channels=1, layout=layout)[0]
    gray = np.asarray(Image.fromarray(PICTURE).convert("L"), int)
    assert np.abs(pixels.reshape(6, 8).astype(int) - gray).max() <= 1
    assert pixels.shape == ((6, 8) if layout == "HW" else (6, 8, 1))


def test_sizes_are_covered_stretched_or_contained():
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 200
    file = image_file(wide)
    cover = decode([file], np.uint8, height=4, width=4, rescale_factor=1)[0]
    assert (cover == 200).all()
    contained = decode([file], np.uint8, height=8, width=8, rescale_factor=1, resize="contain", background=7)[0]
    assert (contained[[0, 1, -2, -1]] == 7).all()
    np.testing.assert_array_equal(contained[2:6], wide)
    stretched = decode([file], np.uint8, height=2, width=16, rescale_factor=1, resize="stretch")[0]
    np.testing.assert_array_equal(stretched, np.asarray(Image.fromarray(wide).resize((16, 2), Image.Resampling.LANCZOS)))


def test_an_image_of_a_line_takes_no_more_memory_than_its_size():
    """Resized before it is cropped, it would take 64 x 6,400,000 pixels."""
    line = np.full((1, 100_000, 3), 9, np.uint8)
    pixels = decode([image_file(line)], np.uint8, height=64, width=64, rescale_factor=1)
    assert (pixels == 9).all()


def test_what_is_transparent_shows_the_background():
    clear = np.concatenate([PICTURE, np.zeros((6, 8, 1), np.uint8)], -1)
    file = io.BytesIO()
    Image.fromarray(clear).save(file, "PNG")
    assert (decode([file.getvalue()], np.uint8, rescale_factor=1, background=255) == 255).all()


def test_numbers_stay_in_the_range_of_whole_ones():
    assert decode([image_file(np.full((6, 8, 3), 255, np.uint8))], np.int8, rescale_factor=1).max() == 127
    assert decode([image_file(PICTURE)], np.uint8, rescale_factor=16 / 255).max() == 16


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ([], "takes a list of image files"),
        ([b"no image"], "file 0: no image that can be read"),
        ([image_file(PICTURE), image_file(PICTURE)[:-40]], "file 1: no image that can be read"),
        (["%%%"], "file 0: a text that is no base64"),
        ([3], "file 0: int is no image file"),
    ],
)
def test_what_is_no_file_is_refused_by_its_number(file, why):
    with pytest.raises(BadInput, match=why):
        decode(file)


@pytest.mark.parametrize(
    "settings", [{"image_mean": [0.5]}, {"image_std": [0, 1, 1]}, {"layout": "HW"}, {"height": 0}, {"background": 256}]
)
def test_settings_that_contradict_one_another_are_refused(settings):
    with pytest.raises(ValidationError):
        DecodeImageStep(**{"height": 6, "width": 8} | settings)


def scores(image):
    return {"scores": jnp.stack([image.mean((1, 2, 3)), 1 - image.mean((1, 2, 3))], -1)}


def export_classifier(target, **settings):
    steps = [DecodeImageStep(**{"height": 6, "width": 8} | settings)]
    after = [ProbabilitiesStep(step="softmax"), LabelsStep(names=["bright", "dark"])]
    args = (jnp.zeros((1, 6, 8, 3)),)
    return argosy.export(scores, args, target, platforms=["cpu"], batch="symbolic", preprocess=steps, postprocess=after)


def test_a_bundle_reads_files_and_names_classes(tmp_path):
    export_classifier(tmp_path / "b")
    bundle = Bundle.open(tmp_path / "b")
    light, dark = (image_file(np.full((12, 9, 3), value, np.uint8)) for value in (250, 5))
    outputs = bundle.run({"image_file": [light, dark]})
    assert outputs["label"] == ["bright", "dark"]
    assert outputs["probabilities"].sum(-1) == pytest.approx(1)
    arrays = bundle.run({"image": np.stack([np.full((6, 8, 3), v / 255, np.float32) for v in (250, 5)])})
    np.testing.assert_allclose(outputs["scores"], arrays["scores"], atol=1e-6)
    # Its own example, and a file from the command line.
    assert run_bundle(str(tmp_path / "b"), None)["label"] == ["bright"]
    (tmp_path / "dark.png").write_bytes(dark)
    assert run_bundle(str(tmp_path / "b"), str(tmp_path / "dark.png"))["label"] == ["dark"]
    with pytest.raises(BadInput, match="one of them: pixels are made of the file"):
        bundle.run({"image_file": [light], "image": np.zeros((1, 6, 8, 3), np.float32)})
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["signatures"]["call"]["preprocess"][0]["step"] == "decode_image"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"height": 7}, r"of shape \[7, 8, 3\], and `image` takes \[batch, 6, 8, 3\]"),
        ({"image": "picture"}, "makes `picture`, and there is no such input"),
        ({"input": "image"}, "which is an input of the function too"),
    ],
)
def test_steps_that_do_not_fit_are_refused_before_anything_is_written(settings, why, tmp_path):
    with pytest.raises(BadInput, match=why):
        export_classifier(tmp_path / "b", **settings)
    assert not (tmp_path / "b").exists()
