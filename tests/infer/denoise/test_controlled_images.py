"""ControlNets of UNets: small pipelines against what diffusers draws (tests/reference/image_pipelines.py), the verb, mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_weights import write_model, write_pipeline
from PIL import Image
from safetensors.numpy import load_file, save_file

import argosy
from argosy.core.errors import BadInput
from argosy.core.formats.image_files import is_stretched
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.jobs.images import GenerateImages, generate_images

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"
NAMES = ["pipeline-sd-controlnet", "pipeline-sdxl-controlnet"]
PROMPTS = ["a red fox in the snow", "nothing"]
TOLERANCE = 5e-5  # of the brightest pixel, as for pipelines without control
SIZE = (48, 32)
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: write_pipeline(GOLDENS / name, tmp_path_factory.mktemp("controlled") / name) for name in NAMES}


@pytest.fixture(scope="module")
def pipes(folders: dict[str, Path]) -> dict[str, ImagePipeline]:
    return {name: argosy.load(folder) for name, folder in folders.items()}


def golden_and_arguments(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A golden, and the arguments of its images."""
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    control = np.moveaxis(golden["control"], 1, -1)
    arguments = {"steps": 3, "guidance": 4.0, "size": SIZE, "latents": golden["latents"], "output": "float", "control_image": control}
    return golden, arguments


CASES = {
    "images": {"negative": ["snow", "a fox"], "control_scale": 0.8},
    "guessed": {"guess_mode": True},
    "plain": {"guidance": 1.0},
    "span": {"control_start": 0.2, "control_end": 0.7, "steps": 5},
}


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_it_draws_what_diffusers_draws(name: str, pipes: dict[str, ImagePipeline]):
    golden, arguments = golden_and_arguments(name)
    for key, changes in CASES.items():
        images = pipes[name].images(PROMPTS, **arguments | changes)
        assert np.abs(images - golden[f"out_{key}"]).max() < TOLERANCE, key


@pytest.mark.slow
def test_a_controlnet_of_its_own_steers_a_plain_pipeline_and_is_saved_with_it(folders, tmp_path):
    plain = write_pipeline(GOLDENS / "pipeline-sd", tmp_path / "plain")
    # Its UNet has the same sizes and other weights.
    pipe = argosy.load(plain, controlnet=folders["pipeline-sd-controlnet"] / "controlnet")
    _, arguments = golden_and_arguments("pipeline-sd-controlnet")
    free = {key: value for key, value in arguments.items() if key != "control_image"}
    steered, without = pipe.images(PROMPTS, **arguments), argosy.load(plain).images(PROMPTS, **free)
    assert np.abs(steered - without).max() > 0.02
    np.testing.assert_allclose(pipe.images(PROMPTS, **arguments | {"control_scale": 0.0}), without, atol=1e-5)
    pipe.save(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "StableDiffusionControlNetPipeline"
    assert index["controlnet"] == ["diffusers", "ControlNetModel"]
    assert (tmp_path / "saved" / "controlnet" / "diffusion_pytorch_model.safetensors").is_file()
    np.testing.assert_array_equal(argosy.load(tmp_path / "saved").images(PROMPTS, **arguments), steered)
    for wrong, problem in (
        ({}, "there is no image that it follows"),
        ({"control_image": arguments["control_image"][:, :8]}, "control_image of"),
    ):
        with pytest.raises(BadInput, match=problem):
            pipe.images(PROMPTS, **free | wrong)


@pytest.fixture(scope="module")
def both(folders, tmp_path_factory) -> tuple[ImagePipeline, dict[str, Any]]:
    """A plain pipeline with two ControlNets, as the golden has them, and the arguments of its images."""
    folder, scratch = folders[NAMES[0]], tmp_path_factory.mktemp("several")
    second = shutil.copytree(folder / "controlnet", scratch / "second")
    tensors = load_file(second / WEIGHTS)
    save_file({name: np.ascontiguousarray(w[::-1]) for name, w in tensors.items()}, second / WEIGHTS, metadata={"format": "pt"})
    plain = shutil.copytree(folder, scratch / "plain")
    shutil.rmtree(plain / "controlnet")
    index = json.loads((plain / "model_index.json").read_text(encoding="utf-8"))
    del index["controlnet"]
    (plain / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}), encoding="utf-8")
    _, arguments = golden_and_arguments(NAMES[0])
    arguments |= {"control_image": [arguments["control_image"], 1 - arguments["control_image"]], "control_scale": [0.8, 0.5]}
    return argosy.load(plain, controlnet=[folder / "controlnet", second]), arguments


def test_several_controlnets_draw_what_diffusers_draws(both, tmp_path):
    """Each with its image, its scale and its span of steps; from a folder that was saved with them too."""
    (pipe, arguments), golden = both, dict(np.load(GOLDENS / NAMES[0] / "golden.npz"))
    spans = {"control_start": [0.0, 0.3], "control_end": [0.7, 1.0], "steps": 5}
    pipe.save(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text(encoding="utf-8"))
    assert index["controlnet"] == ["diffusers", "MultiControlNetModel"]
    for pipeline in (pipe, argosy.load(tmp_path / "saved")):
        assert np.abs(pipeline.images(PROMPTS, **arguments | spans) - golden["out_several"]).max() < TOLERANCE
    assert np.abs(pipe.images(PROMPTS, **arguments, guess_mode=True) - golden["out_several_guessed"]).max() < TOLERANCE
    for key, bad, problem in (
        ("control_image", arguments["control_image"][0], "one for each of 2 ControlNets"),
        ("control_image", arguments["control_image"][:1], "control_image: 1 of them for 2 ControlNets"),
        ("control_scale", [1.0] * 3, "control_scale: 3 of them for 2 ControlNets"),
        ("control_end", [1.0, 0.0], "control_start = 0.0 and control_end = 0.0 of ControlNet 2 of 2"),
        ("control_scale", [1.0, -1.0], "control_scale = -1.0 of ControlNet 2 of 2"),
        ("control_image", [arguments["control_image"][0], arguments["control_image"][1][:, :8]], "control_image of ControlNet 2 of 2"),
    ):
        with pytest.raises(BadInput, match=problem):
            pipe.images(PROMPTS, **arguments | {key: bad})


def test_a_control_image_of_another_ratio_is_stretched():
    assert not is_stretched((48, 32, 3), (96, 64))
    assert is_stretched((48, 33, 3), (48, 32))
    assert not is_stretched((1000, 667, 3), (48, 32))
    assert is_stretched((30, 40, 3), (48, 32))


@pytest.mark.slow
def test_an_image_is_the_same_in_any_batch(pipes):
    _, arguments = golden_and_arguments("pipeline-sd-controlnet")
    whole = pipes["pipeline-sd-controlnet"].images(PROMPTS, **arguments)
    apart = pipes["pipeline-sd-controlnet"].images(PROMPTS, **arguments, batch=1)
    np.testing.assert_allclose(apart, whole, atol=1e-5)


@pytest.mark.slow
def test_the_verb_draws_what_python_draws(folders, pipes, tmp_path):
    draw = np.random.default_rng(0)
    control = draw.integers(0, 256, (*SIZE, 3)).astype(np.uint8)
    Image.fromarray(control).save(tmp_path / "edges.png")
    words = {"image": str(tmp_path / "out.png"), "control_image": str(tmp_path / "edges.png"), "size": "32x48", "steps": 2}
    messages: list[str] = []
    plain_and_net = write_pipeline(GOLDENS / "pipeline-sd", tmp_path / "plain"), folders["pipeline-sd-controlnet"] / "controlnet"
    generate_images(str(folders["pipeline-sd-controlnet"]), "a fox", GenerateImages(**words, control_scale=0.5), messages.append)
    with Image.open(tmp_path / "out.png") as file:
        pixels = np.array(file)
    assert not any("stretched" in line for line in messages)
    two = {**words, "control_image": [words["control_image"]] * 2, "size": "48x48", "controlnet": [f"{plain_and_net[1]}"] * 2}
    generate_images(str(plain_and_net[0]), "a fox", GenerateImages(**two, control_scale=[0.5, 0.2]), messages.append)
    assert any("32x48 pixels are stretched to 48x48" in line for line in messages)
    expected = pipes["pipeline-sd-controlnet"].images("a fox", size=SIZE, steps=2, control_image=control, control_scale=0.5)[0]
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_mistakes_are_named(folders, pipes, tmp_path):
    plain = write_pipeline(GOLDENS / "pipeline-sd", tmp_path / "plain")
    other = write_model(GOLDENS / "controlnet-sd", tmp_path / "other")
    pipe, (_, base) = pipes["pipeline-sd-controlnet"], golden_and_arguments("pipeline-sd-controlnet")
    for arguments, problem in (
        ({"control_start": 0.5, "control_end": 0.5}, "control_start = 0.5 and control_end = 0.5"),
        ({"control_start": 0.51, "control_end": 0.54, "steps": 5}, "no evaluation of 6"),
        ({"control_scale": -1.0}, "control_scale = -1"),
    ):
        with pytest.raises(BadInput, match=problem):
            pipe.images(PROMPTS, **base | arguments)
    with pytest.raises(BadInput, match="a control image without a ControlNet"):
        argosy.load(plain).images(PROMPTS, **base)
    for folder, controlnet, problem in (
        (plain, other, r"of another model: its text_width = 26, and the UNet's text_width = 28"),
        (plain, plain / "unet", "is a UNetConfig and no ControlNet"),
        (folders["pipeline-sd-controlnet"], other, "has a ControlNet already"),
        (write_pipeline(GOLDENS / "pipeline-wan", tmp_path / "wan"), other, "WanPipeline with a ControlNet is not built"),
        (write_pipeline(GOLDENS / "pipeline-sd3", tmp_path / "sd3"), other, r"steers UNets .* and the model is a SD3Config"),
    ):
        with pytest.raises(BadInput, match=problem):
            argosy.load(folder, controlnet=controlnet)
    words: Any = {"image": str(tmp_path / "out.png"), "steps": 1}
    with pytest.raises(BadInput, match="control_scale: this model has no ControlNet"):
        generate_images(str(plain), "a fox", GenerateImages(**words, control_scale=0.5))
    with pytest.raises(BadInput, match="a ControlNet without the image that it follows"):
        generate_images(str(folders["pipeline-sd-controlnet"]), "a fox", GenerateImages(**words))
    with pytest.raises(BadInput, match="bundles with a ControlNet are not built"):
        pipe.export(tmp_path / "bundle")
    folder = write_model(GOLDENS / "controlnet-sd", tmp_path / "pooled")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"global_pool_conditions": True}), encoding="utf-8")
    with pytest.raises(BadInput, match="global_pool_conditions"):
        argosy.load(plain, controlnet=folder)
