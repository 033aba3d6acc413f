"""A server of images over HTTP: OpenAI's client, streams, batches, limits, cancellation and drain."""

import base64
import io
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from serve.image_servers import Server, class_pipeline, serving, wait_until_idle

from argosy.core.errors import ArgosyError
from argosy.core.formats.image_files import read_image
from argosy.core.formats.png import png_bytes
from argosy.infer.denoise.engine import each_image
from argosy.infer.denoise.finite import check_finite
from argosy.infer.denoise.pipeline import ImagePipeline

NOISE = np.random.default_rng(3).integers(0, 255, (40, 40, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def pipe() -> ImagePipeline:
    return class_pipeline()


@pytest.fixture(scope="module")
def server(pipe: ImagePipeline) -> Iterator[Server]:
    with serving(pipe) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def pixels(file: str) -> np.ndarray:
    """Of a PNG in base64, read by hand: 8 bits, RGB, lines without filters."""
    data = base64.b64decode(file)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    stream, parts = io.BytesIO(data[8:]), {}
    while head := stream.read(8):
        size, kind = struct.unpack(">I4s", head)
        parts[kind] = stream.read(size)
        stream.read(4)
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    return np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


def test_openais_client_gets_the_images_of_the_pipeline(client: openai.OpenAI, pipe: ImagePipeline):
    response = client.images.generate(prompt="fox", model="classes", n=2, size="10x8", extra_body={"seed": 3, "num_inference_steps": 4})
    expected = pipe.images("fox", n=2, seed=3, steps=4, size=(8, 10))
    assert response.data is not None
    for entry, image in zip(response.data, expected, strict=True):
        assert np.abs(pixels(entry.b64_json or "").astype(int) - image).max() <= 1
    assert response.output_format == "png"


def test_seeds_are_honored_in_any_batch(client: openai.OpenAI):
    def ask(seed: int, more: dict) -> np.ndarray:
        response = client.images.generate(prompt="owl", extra_body={"seed": seed} | more)
        assert response.data is not None
        return pixels(response.data[0].b64_json or "").astype(int)

    alone = [ask(seed, {}) for seed in range(4)]
    results: list[np.ndarray | None] = [None] * 4
    # The first one keeps the engine busy, so that the others share a batch.
    ahead = threading.Thread(target=ask, args=(9, {"num_inference_steps": 100}))
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, ask(i, {}))) for i in range(4)]
    for thread in (ahead, *threads):
        thread.start()
    for thread in (ahead, *threads):
        thread.join()
    for thread, other in zip(alone, results, strict=True):
        assert other is not None
        assert np.abs(thread - other).max() <= 1


def test_step_caching_is_the_requests_or_the_servers(pipe: ImagePipeline):
    with serving(pipe, step_cache=0.3, warm_up=False) as (address, _, _), httpx.Client(base_url=address, timeout=60) as http:
        body = {"prompt": "fox", "seed": 3, "num_inference_steps": 12, "guidance_scale": 1.0}
        full, cached = (pipe.images("fox", seed=3, steps=12, guidance=1.0, step_cache=threshold) for threshold in (1e-9, 0.3))
        assert np.abs(full.astype(int) - cached).max() > 1
        for more, expected in (({}, cached), ({"step_cache": 1e-9}, full)):
            answer = http.post("/v1/images/generations", json=body | more).json()
            assert np.abs(pixels(answer["data"][0]["b64_json"]).astype(int) - expected[0]).max() <= 1
        reused = re.search(r"argosy_image_reused_evaluations_total (\d+)", http.get("/metrics").text)
        assert reused is not None
        assert 0 < int(reused[1]) < 12


def test_without_a_seed_images_differ(client: openai.OpenAI):
    files = {client.images.generate(prompt="owl").data[0].b64_json for _ in range(2)}  # type: ignore[index]
    assert len(files) == 2


def test_a_stream_has_images_on_the_way(client: openai.OpenAI):
    events = list(client.images.generate(prompt="dog", stream=True, partial_images=2, extra_body={"seed": 1, "num_inference_steps": 9}))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]
    response = client.images.generate(prompt="dog", extra_body={"seed": 1, "num_inference_steps": 9})
    assert response.data is not None
    assert events[-1].b64_json == response.data[0].b64_json
    assert events[0].b64_json != events[-1].b64_json


def test_progress_is_told_where_it_is_asked_for(server: Server):
    body = {"prompt": "cat", "stream": True, "progress": True, "num_inference_steps": 3}
    with httpx.stream("POST", f"{server[0]}/v1/images/generations", json=body) as answer:
        names = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert names == ["image_generation.progress"] * 3 + ["image_generation.completed"]


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, "prompt", "missing"),
        ({"prompt": "foxy"}, 400, None, "no class"),
        ({"prompt": "fox", "size": "9x8"}, 400, None, "multiples of 2"),
        ({"prompt": "fox", "size": "8"}, 400, "size", "WIDTHxHEIGHT"),
        ({"prompt": "fox", "size": "1000x1000"}, 400, "size", "pixels"),
        ({"prompt": "fox", "n": 5}, 400, "n", "this server allows 4"),
        ({"prompt": "fox", "num_inference_steps": 201}, 400, "num_inference_steps", "allows 200"),
        ({"prompt": "fox", "response_format": "url"}, 400, "response_format", "b64_json"),
        ({"prompt": "fox", "output_format": "gif"}, 400, "output_format", "png"),
        ({"prompt": "fox", "partial_images": 1}, 400, "partial_images", "set `stream`"),
        ({"prompt": "fox", "quality": "hd"}, 400, "quality", "not supported"),
        ({"prompt": "fox", "sede": 1}, 400, "sede", "did you mean `seed`"),
        ({"prompt": "fox", "seed": -1}, 400, "seed", "greater"),
        ({"prompt": "fox", "step_cache": 0}, 400, "step_cache", "greater"),
        ({"prompt": "fox", "model": "other"}, 404, "model", "does not exist"),
        ({"prompt": "fox", "n": 4, "stream": "yes"}, 400, "stream", "boolean"),
    ],
)
def test_what_is_beyond_the_model_is_refused(server: Server, body: dict, status: int, param: str | None, says: str):
    answer = httpx.post(f"{server[0]}/v1/images/generations", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert says in error["message"]


def png(image: np.ndarray) -> tuple[str, bytes, str]:
    return "image.png", png_bytes(image), "image/png"


def test_edits_keep_what_the_mask_covers(client: openai.OpenAI):
    image = np.random.default_rng(0).integers(0, 255, (8, 8, 3)).astype(np.uint8)
    clear = np.full((8, 8, 1), 255, np.uint8)
    clear[:4] = 0
    mask = np.concatenate([image, clear], 2)
    response = client.images.edit(image=png(image), mask=png(mask), prompt="fox", n=2, extra_body={"seed": 4})
    assert response.data is not None
    first, second = (pixels(entry.b64_json or "").astype(int) for entry in response.data)
    assert np.abs(first[4:] - image[4:]).max() <= 1
    assert np.abs(first[:4] - image[:4]).max() > 10
    assert np.abs(first[:4] - second[:4]).max() > 1


def test_a_weak_edit_stays_near_its_image_at_another_size(client: openai.OpenAI):
    image = np.full((16, 12, 3), 200, np.uint8)
    more = {"strength": 0.05, "num_inference_steps": 40, "guidance_scale": 1}
    response = client.images.edit(image=png(image), prompt="fox", extra_body=more)
    assert response.data is not None
    result = pixels(response.data[0].b64_json or "").astype(int)
    assert result.shape == (16, 12, 3)
    assert np.abs(result - 200).mean() < 15
    response = client.images.edit(image=png(image), prompt="fox", size="8x8", extra_body=more)  # type: ignore[call-overload]
    assert response.size == "8x8"


def test_edits_stream_events_of_their_own(client: openai.OpenAI):
    image = np.zeros((8, 8, 3), np.uint8)
    events = list(client.images.edit(image=png(image), prompt="fox", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("files", "data", "says"),
    [
        ({}, {"prompt": "fox"}, "`image` is missing"),
        ({"image": b"no image"}, {"prompt": "fox"}, "`image`: no image that can be read"),
        ({"image": png_bytes(NOISE)[:1000]}, {"prompt": "fox"}, "`image`: no image that can be read"),
        ({"image": png_bytes(np.zeros((200, 200, 3), np.uint8))}, {"prompt": "fox"}, "at most"),
        ({"image": png_bytes(np.zeros((8, 8, 3), np.uint8))}, {}, "`prompt` is missing"),
        ({"image": png_bytes(np.zeros((8, 8, 3), np.uint8))}, {"prompt": "fox", "n": "two"}, "`n`"),
        ({"image": png_bytes(np.zeros((8, 8, 3), np.uint8))}, {"prompt": "fox", "strength": "0"}, "`strength`"),
        ({"image": png_bytes(np.zeros((8, 8, 3), np.uint8)), "other": b""}, {"prompt": "fox"}, "`other`"),
        (
            {"image": png_bytes(np.zeros((8, 8, 3), np.uint8)), "mask": png_bytes(np.zeros((4, 4, 4), np.uint8))},
            {"prompt": "fox"},
            "`mask` has 4x4 pixels",
        ),
        (
            {"image": png_bytes(np.zeros((8, 8, 3), np.uint8)), "mask": png_bytes(np.zeros((8, 8, 3), np.uint8))},
            {"prompt": "fox"},
            "no transparency",
        ),
    ],
)
def test_forms_that_cannot_be_used_are_refused_by_name(server: Server, files: dict[str, bytes], data: dict[str, str], says: str):
    parts: dict[str, tuple] = {name: ("file.png", content) for name, content in files.items()}
    parts = parts or {"prompt": (None, "fox")}
    answer = httpx.post(f"{server[0]}/v1/images/edits", data=data if files else None, files=parts)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_an_edit_that_is_no_form_is_refused(server: Server):
    assert httpx.post(f"{server[0]}/v1/images/edits", json={"prompt": "fox"}).status_code == 415
    broken = httpx.post(f"{server[0]}/v1/images/edits", content=b"x", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_other_formats_are_written(client: openai.OpenAI, kind: str):
    options = {"seed": 2, "output_format": kind}
    response = client.images.generate(prompt="fox", output_compression=100, extra_body=options)
    assert response.data is not None
    result = read_image(base64.b64decode(response.data[0].b64_json or ""))
    exact = client.images.generate(prompt="fox", extra_body={"seed": 2})
    assert exact.data is not None
    # Both formats halve the resolution of colors, and these images are nearly noise.
    assert np.corrcoef(result.ravel(), pixels(exact.data[0].b64_json or "").ravel())[0, 1] > 0.5


def test_too_many_images_are_refused_and_those_that_wait_are_drawn(pipe: ImagePipeline):
    with serving(pipe, batch=1) as (address, service, _), httpx.Client(base_url=address, timeout=60) as http:
        answers: list[int] = []

        def ask(n: int) -> None:
            body = {"prompt": "cat", "n": n, "num_inference_steps": 150}
            answers.append(http.post("/v1/images/generations", json=body).status_code)

        threads = [threading.Thread(target=ask, args=(4,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [200, 200, 503] or sorted(answers) == [200, 503, 503]
        text = http.get("/metrics").text
        count = 4.0 * answers.count(200)
        assert f"argosy_images_total {count}" in text
        wait_until_idle(service)


def test_a_client_that_leaves_ends_its_images(server: Server):
    address, service, _ = server
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/images/generations", json={"prompt": "cat", "num_inference_steps": 200, "size": "64x64"}, timeout=0.3)
    wait_until_idle(service)
    text = httpx.get(f"{address}/metrics").text
    assert 'argosy_image_requests_total{outcome="canceled"} 1.0' in text


def test_a_drain_finishes_what_runs_and_refuses_the_rest(pipe: ImagePipeline):
    with serving(pipe) as (address, service, stop):
        statuses: list[int] = []
        body = {"prompt": "cat", "num_inference_steps": 200, "size": "32x32"}
        thread = threading.Thread(
            target=lambda: statuses.append(httpx.post(f"{address}/v1/images/generations", json=body, timeout=60).status_code)
        )
        thread.start()
        while service.engine.idle:
            time.sleep(0.005)
        stop.set()
        while not service.draining:
            time.sleep(0.005)
        assert httpx.get(f"{address}/health").status_code == 503
        assert httpx.post(f"{address}/v1/images/generations", json=body).status_code == 503
        thread.join()
        assert statuses == [200]


def test_the_page_needs_no_key_and_its_requests_do(pipe: ImagePipeline):
    with serving(pipe, api_key="secret") as (address, _, _), httpx.Client(base_url=address) as http:
        page = http.get("/")
        assert 'data-key="true"' in page.text
        assert http.get("/web/draw.js").status_code == 200
        assert http.get("/web/model").status_code == 401
        about = http.get("/web/model", headers={"authorization": "Bearer secret"}).json()
        assert about == {"name": "classes", "width": 8, "height": 8, "steps": 5, "guidance": 2.0, "multiple": 2, "controls": []}
        models = http.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
        assert models["data"][0]["id"] == "classes"


def test_warm_up_compiles_all_batches(pipe: ImagePipeline, compilations: list[str]):
    with serving(class_pipeline(), batch=3) as (url, service, _):
        service.warm_up()
        assert compilations
        compilations.clear()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for n in (1, 2, 3):
                client.images.generate(prompt="fox", model="classes", n=n)
        # The class of the first prompt is converted to int32 by a program of its own.
        assert len(compilations) <= 1


def test_numbers_that_are_not_finite_end_the_image_that_they_are_of_alone():
    def decode(latents: np.ndarray) -> np.ndarray:
        check_finite("the denoiser", latents)
        return latents + 1

    images = each_image(decode, np.array([[0.0], [np.nan], [2.0], [np.inf]], np.float32))
    assert [isinstance(image, ArgosyError) for image in images] == [False, True, False, True]
    assert [float(image[0]) for image in images[::2]] == [1, 3]
