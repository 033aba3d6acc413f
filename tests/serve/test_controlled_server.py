"""A server of a pipeline with ControlNets: control images in JSON and in forms draw what Python draws; mistakes are named."""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from golden_weights import write_pipeline
from safetensors.numpy import load_file, save_file
from serve import browser
from serve.image_servers import Server, class_pipeline, serving

import argosy
from argosy.core.formats.image_files import read_image
from argosy.core.formats.png import png_bytes
from argosy.infer.denoise.pipeline import ImagePipeline

GOLDEN = Path(__file__).parents[1] / "goldens" / "images" / "pipeline-sd-controlnet"
# Height and width, which are those of the control images.
SIZE = (16, 24)
DRAW = np.random.default_rng(5)
DEPTHS, PHOTO = (DRAW.integers(0, 256, (*SIZE, 3)).astype(np.uint8) for _ in range(2))
# White but for a corner: it changes what is drawn.
EDGES = np.full((*SIZE, 3), 255, np.uint8)
EDGES[:4, :6] = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """That of the golden, whose ControlNet looks closer at its control image: as it was drawn, that changes three levels of 255."""
    root = write_pipeline(GOLDEN, tmp_path_factory.mktemp("controlled") / "sd")
    (file,) = (root / "controlnet").glob("*.safetensors")
    tensors = load_file(file)
    name = "controlnet_cond_embedding.conv_out.weight"
    save_file(tensors | {name: 30 * tensors[name]}, file, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def pipe(folder: Path) -> ImagePipeline:
    return argosy.load(folder)


@pytest.fixture(scope="module")
def server(pipe: ImagePipeline) -> Iterator[Server]:
    with serving(pipe) as server:
        yield server


def text_of(image: np.ndarray) -> str:
    return base64.b64encode(png_bytes(image)).decode()


def images_of(document: Any) -> list[np.ndarray]:
    return [read_image(base64.b64decode(entry["b64_json"])).astype(int) for entry in document["data"]]


def test_control_images_in_json_draw_what_python_draws(server: Server, pipe: ImagePipeline):
    fields: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "guidance_scale": 3.0, "control_scale": 0.8, "control_end": 0.7}
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        more = fields | {"control_image": f"data:image/png;base64,{text_of(EDGES)}"}
        images = images_of(client.images.generate(prompt="a red fox", n=2, size="24x16", extra_body=more).model_dump())
    arguments: dict[str, Any] = {"n": 2, "seed": 3, "steps": 3, "guidance": 3.0, "size": SIZE}
    control = {"control_image": EDGES[None], "control_scale": 0.8, "control_end": 0.7}
    expected = pipe.images("a red fox", **arguments, **control)
    assert all(np.abs(drawn_image - image).max() <= 1 for drawn_image, image in zip(images, expected, strict=True))
    other = pipe.images("a red fox", **arguments, **control | {"control_image": 255 - EDGES[None]})
    assert np.abs(other.astype(int) - expected).max() > 3, "the control image decides"


@pytest.mark.slow
def test_a_form_has_the_control_image_as_a_file(server: Server, pipe: ImagePipeline):
    files = {name: ("a.png", png_bytes(image), "image/png") for name, image in (("image", PHOTO), ("control_image", EDGES))}
    data = {"prompt": "snow", "seed": "1", "num_inference_steps": "4", "strength": "0.6", "guess_mode": "true", "control_scale": "0.5"}
    answer = httpx.post(f"{server[0]}/v1/images/edits", files=files, data=data, timeout=60)
    assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = {"seed": 1, "steps": 4, "strength": 0.6, "guess_mode": True, "control_scale": 0.5, "size": SIZE}
    expected = pipe.images("snow", image=PHOTO[None], control_image=EDGES[None], **fields)
    assert np.abs(images_of(answer.json())[0] - expected[0]).max() <= 1


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({}, "control_image", "needs the image that its ControlNet follows"),
        ({"control_image": "%%"}, "control_image", "is no base64"),
        ({"control_image": "é"}, "control_image", "is no base64"),
        ({"control_image": base64.b64encode(b"text").decode()}, "control_image", "`control_image`: "),
        ({"control_image": [text_of(EDGES)] * 2}, "control_image", "needs the image that its ControlNet follows"),
        ({"control_image": text_of(EDGES), "control_scale": -1}, None, "control_scale = -1.0"),
        ({"control_image": text_of(EDGES), "control_scale": 1e38}, None, "control_scale = 1e+38: 0 to 100"),
        ({"control_image": text_of(EDGES), "control_start": 0.9, "control_end": 0.5}, None, "0 <= start < end <= 1"),
    ],
)
def test_mistakes_are_named(server: Server, more: dict[str, Any], param: str | None, says: str):
    answer = httpx.post(f"{server[0]}/v1/images/generations", json={"prompt": "a fox", "num_inference_steps": 2} | more, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_a_model_without_a_controlnet_refuses_their_fields():
    with serving(class_pipeline()) as (address, _, _):
        answer = httpx.post(f"{address}/v1/images/generations", json={"prompt": "fox", "control_scale": 0.5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "control_scale"


@pytest.mark.slow
def test_several_controlnets_have_an_image_each_and_a_warm_up(folder: Path, tmp_path: Path):
    second = shutil.copytree(folder / "controlnet", tmp_path / "second")
    plain = write_pipeline(GOLDEN.parent / "pipeline-sd", tmp_path / "sd")
    pipe = argosy.load(plain, controlnet=[folder / "controlnet", second])
    with serving(pipe) as (address, service, _):
        service.warm_up()
        body: dict[str, Any] = {"prompt": "a fox", "seed": 2, "num_inference_steps": 2, "size": "24x16", "control_scale": [0.8, 0.4]}
        images, where = [text_of(EDGES), text_of(DEPTHS)], f"{address}/v1/images/generations"
        answer = httpx.post(where, json=body | {"control_image": images}, timeout=60)
        assert answer.status_code == 200, answer.text
        lacking = httpx.post(where, json=body | {"control_image": images[0]}, timeout=60)
        assert "needs 2 images, one for each ControlNet" in lacking.json()["error"]["message"]
    fields: dict[str, Any] = {"seed": 2, "steps": 2, "size": SIZE, "control_scale": [0.8, 0.4]}
    expected = pipe.images("a fox", control_image=[EDGES[None], DEPTHS[None]], **fields)
    assert np.abs(images_of(answer.json())[0] - expected[0]).max() <= 1


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium on this machine")
def test_the_page_sends_a_control_image(server: Server, pipe: ImagePipeline):
    values = {"prompt": "a red fox", "width": SIZE[1], "height": SIZE[0], "steps": 2, "guidance": 3, "seed": 3}
    expected = pipe.images("a red fox", steps=2, guidance=3.0, seed=3, size=SIZE, control_image=EDGES[None])[0].astype(int)
    with browser.opened() as page:
        page.open(f"{server[0]}/")
        page.until("document.querySelectorAll('#controls [type=file]').length == 1")
        for name, value in values.items():
            page.run(f"document.querySelector('#{name}').value = {json.dumps(value)}")
        page.run("document.querySelector('#draw').click()")
        assert page.run("document.querySelector('#ask').checkValidity()") is False
        page.run(
            f"""(() => {{
              const bytes = Uint8Array.from(atob("{text_of(EDGES)}"), letter => letter.charCodeAt(0)), chosen = new DataTransfer();
              chosen.items.add(new File([bytes], "edges.png", {{ type: "image/png" }}));
              document.querySelector("#controls [type=file]").files = chosen.files;
              document.querySelector("#draw").click();
            }})()"""
        )
        page.until("document.querySelectorAll('#images canvas:not(.unfinished)').length == 1 && document.querySelector('#stop').hidden")
        image = page.run("document.querySelector('#images canvas').toDataURL('image/png')")
        assert page.run("document.querySelector('#refused').textContent") == ""
    image_shown = read_image(base64.b64decode(image.partition(",")[2])).astype(int)[..., :3]
    assert np.abs(image_shown - expected).max() <= 1


@pytest.mark.slow
def test_a_union_of_flux_is_told_its_kind_of_control(tmp_path: Path):
    pipe = argosy.load(write_pipeline(GOLDEN.parent / "pipeline-flux-controlnet", tmp_path / "flux"))
    pipe.defaults = replace(pipe.defaults, size=SIZE)
    with serving(pipe) as (address, service, _):
        service.warm_up()
        where = f"{address}/v1/images/generations"
        body: dict[str, Any] = {"prompt": "a fox", "seed": 2, "num_inference_steps": 2, "size": "24x16"}
        body["control_image"] = text_of(EDGES)
        lacking = httpx.post(where, json=body, timeout=120)
        assert "control_mode is missing" in lacking.json()["error"]["message"]
        answer = httpx.post(where, json=body | {"control_mode": 3, "control_scale": 0.5}, timeout=120)
        assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = {"seed": 2, "steps": 2, "size": SIZE, "control_scale": 0.5, "control_image": EDGES[None]}
    expected = pipe.images("a fox", **fields, control_mode=3)
    assert np.abs(images_of(answer.json())[0] - expected[0]).max() <= 1
    assert np.abs(pipe.images("a fox", **fields, control_mode=1).astype(int) - expected).max() > 3, "the kind decides"
