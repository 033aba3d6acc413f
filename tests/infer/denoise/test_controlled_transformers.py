"""ControlNets of Flux and Stable Diffusion 3: small pipelines against what diffusers draws (tests/reference/image_pipelines.py)."""

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
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.jobs.images import GenerateImages, generate_images

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"
NAMES = ["pipeline-flux-controlnet", "pipeline-sd3-controlnet", "pipeline-sd3.5-controlnet"]
PROMPTS = ["a red fox in the snow", "nothing"]
TOLERANCE = 5e-5  # of the brightest pixel
SIZE = (48, 32)
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: write_pipeline(GOLDENS / name, tmp_path_factory.mktemp("controlled") / name) for name in NAMES}


def golden_and_arguments(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A golden, and the arguments of its images."""
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    control = np.moveaxis(golden["control"], 1, -1)
    arguments = {"steps": 3, "guidance": 3.5, "size": SIZE, "latents": golden["latents"], "output": "float", "control_image": control}
    return golden, arguments


def cases(name: str) -> dict[str, dict[str, Any]]:
    """What is drawn otherwise: Flux's ControlNet is a union of four kinds of control, and takes no negative prompts."""
    is_flux = name == NAMES[0]
    images = {"control_scale": 0.8} | ({"control_mode": 2} if is_flux else {"negative": ["snow", "a fox"]})
    span = {"control_start": 0.2, "control_end": 0.7, "steps": 5} | ({"control_mode": 1} if is_flux else {"guidance": 1.0})
    return {"images": images, "span": span}


@pytest.mark.parametrize("name", [pytest.param(NAMES[0]), *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_it_draws_what_diffusers_draws(name: str, folders: dict[str, Path]):
    """The ControlNet of 3.5 reads no text, and the tokens of the model itself. With step caching it runs in each evaluation in which it
    acts."""
    (golden, arguments), pipe = golden_and_arguments(name), argosy.load(folders[name])
    for key, changes in cases(name).items():
        assert np.abs(pipe.images(PROMPTS, **arguments | changes) - golden[f"out_{key}"]).max() < TOLERANCE, key
        if name == NAMES[1]:
            cached = pipe.images(PROMPTS, **arguments | changes, step_cache=1e-6)
            assert np.abs(cached - golden[f"out_{key}"]).max() < TOLERANCE, key


def two(folder: Path, scratch: Path) -> ImagePipeline:
    """The pipeline of a golden with two ControlNets, given beside the folder without one."""
    second = shutil.copytree(folder / "controlnet", scratch / "second")
    tensors = load_file(second / WEIGHTS)
    # The table of positions is none of torch's parameters, which the golden turned upside down.
    turned = {name: w if name == "pos_embed.pos_embed" else np.ascontiguousarray(w[::-1]) for name, w in tensors.items()}
    save_file(turned, second / WEIGHTS, metadata={"format": "pt"})
    plain = shutil.copytree(folder, scratch / "plain", ignore=shutil.ignore_patterns("controlnet"))
    index = json.loads((plain / "model_index.json").read_text(encoding="utf-8"))
    del index["controlnet"]
    index["_class_name"] = {"FluxControlNetPipeline": "FluxPipeline"}.get(index["_class_name"], "StableDiffusion3Pipeline")
    (plain / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return argosy.load(plain, controlnet=[folder / "controlnet", second])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:2])
def test_several_controlnets_draw_what_diffusers_draws(name: str, folders: dict[str, Path], tmp_path: Path):
    (golden, arguments), pipe = golden_and_arguments(name), two(folders[name], tmp_path)
    arguments |= {
        "control_image": [arguments["control_image"], 1 - arguments["control_image"]],
        "control_scale": [0.8, 0.5],
        "steps": 5,
    }
    arguments |= {"control_start": [0.0, 0.3], "control_end": [0.7, 1.0]} | ({"control_mode": [0, 3]} if name == NAMES[0] else {})
    assert np.abs(pipe.images(PROMPTS, **arguments) - golden["out_several"]).max() < TOLERANCE
    with pytest.raises(BadInput, match="diffusers writes no folder of several"):
        pipe.save(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_controlnet_beside_a_folder_is_saved_with_it(name: str, folders: dict[str, Path], tmp_path: Path):
    (_, arguments), pipe = golden_and_arguments(name), two(folders[name], tmp_path)
    changes = cases(name)["images"]
    pipeline = argosy.load(tmp_path / "plain", controlnet=folders[name] / "controlnet")
    images = pipeline.images(PROMPTS, **arguments | changes)
    pipeline.save(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text(encoding="utf-8"))
    whole = json.loads((folders[name] / "model_index.json").read_text(encoding="utf-8"))
    assert (index["_class_name"], index["controlnet"]) == (whole["_class_name"], whole["controlnet"])
    np.testing.assert_array_equal(argosy.load(tmp_path / "saved").images(PROMPTS, **arguments | changes), images)
    both = arguments | changes | {"control_image": [arguments["control_image"]] * 2, "control_scale": [0.8, 0.0]}
    np.testing.assert_allclose(pipe.images(PROMPTS, **both), images, atol=1e-5)


@pytest.mark.slow
def test_the_verb_draws_what_python_draws(folders: dict[str, Path], tmp_path: Path):
    control = np.random.default_rng(0).integers(0, 256, (*SIZE, 3)).astype(np.uint8)
    Image.fromarray(control).save(tmp_path / "edges.png")
    words: Any = {"image": str(tmp_path / "out.png"), "control_image": str(tmp_path / "edges.png"), "size": "32x48", "steps": 2}
    generate_images(str(folders[NAMES[0]]), "a fox", GenerateImages(**words, control_scale=0.5, control_mode=3))
    with Image.open(tmp_path / "out.png") as file:
        pixels = np.array(file)
    pipe = argosy.load(folders[NAMES[0]])
    expected = pipe.images("a fox", size=SIZE, steps=2, control_image=control, control_scale=0.5, control_mode=3)[0]
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_mistakes_are_named(folders: dict[str, Path], tmp_path: Path):
    (_, arguments), pipe = golden_and_arguments(NAMES[0]), argosy.load(folders[NAMES[0]])
    for changes, problem in (
        ({}, "control_mode is missing: this ControlNet knows 4 kinds of control"),
        ({"control_mode": 4}, "control_mode = 4: this ControlNet knows 4 kinds of control, by their numbers from 0 to 3"),
        ({"control_mode": 1, "guess_mode": True}, "guess_mode: ControlNets of Flux.1 have none"),
        ({"control_mode": [1, 2]}, "control_mode: 2 of them for 1 ControlNet"),
    ):
        with pytest.raises(BadInput, match=problem):
            pipe.images(PROMPTS, **arguments | changes)
    with pytest.raises(BadInput, match="the ControlNet knows one kind of control"):
        argosy.load(folders[NAMES[2]]).images(PROMPTS, **golden_and_arguments(NAMES[2])[1] | {"control_mode": 1})
    flux = write_pipeline(GOLDENS / "pipeline-flux", tmp_path / "flux")
    other = write_model(GOLDENS / "controlnet-flux", tmp_path / "other")
    for controlnet, problem in (
        (other, "is of another model: its text_width = 26, and the model's text_width = 30"),
        (folders[NAMES[1]] / "controlnet", "it steers Stable Diffusion 3 and 3.5, and the model is a FluxConfig"),
    ):
        with pytest.raises(BadInput, match=problem):
            argosy.load(flux, controlnet=controlnet)
