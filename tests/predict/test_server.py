"""The server of bundles as a process: its protocols, its versions, and what it refuses."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from golden_weights import write_pipeline
from helpers import shared
from predict_servers import serving, write_scaled
from starlette.requests import Request

import argosy
from argosy.core.formats.image_files import image_file, read_image, resize_image
from argosy.core.formats.png import png_bytes
from argosy.data.tokenizers.load import find_tokenizer
from argosy.export.bundle import Bundle
from argosy.export.steps import at_unit_length
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.predict.metrics import PredictMetrics
from argosy.predict.repository import Repository
from argosy.predict.service import PredictService
from argosy.predict.settings import PredictSettings
from argosy.web.errors import ApiError
from argosy.weights.build import random_model
from argosy.weights.hub.sentence_steps import EmbeddingSteps, write_steps


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_scaled(folder / "scaled" / "1", 2.0)
    write_scaled(folder / "scaled" / "2", 3.0)
    (folder / "scaled" / "config.yml").write_text("versions: all\nlabels: {stable: 1}\nbatching: {max_batch_size: 8}\n")
    # Copied halfway: there is no manifest yet.
    (folder / "scaled" / "3" / "programs").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[tuple[str, list[str]]]:
    with serving(repository, "limits.body=20000") as address_and_log:
        yield address_and_log


@pytest.fixture(scope="module")
def ask(server: tuple[str, list[str]]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=30) as client:
        yield client


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def infer(ask: httpx.Client, *inputs: dict[str, Any], model: str = "scaled", **more: Any) -> httpx.Response:
    return ask.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs)} | more)


def rows(**more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ROWS} | more


@pytest.mark.parametrize("words, name", [((), "scaled"), (("name=mine",), "mine")])
def test_the_versions_of_one_model_are_a_repository(tmp_path: Path, words: tuple[str, ...], name: str):
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    write_scaled(tmp_path / "scaled" / "2", 3.0)
    with serving(tmp_path / "scaled", "warm_up=false", *words) as (address, _), httpx.Client(base_url=address) as client:
        assert client.get(f"/v2/models/{name}").json()["versions"] == ["2"]
        assert infer(client, rows(), model=name).json()["outputs"][0]["data"][:3] == [3.0, 6.0, 9.0]


def test_the_open_inference_protocol(ask: httpx.Client):
    assert ask.get("/v2").json()["name"] == "argosy"
    assert ask.get("/v2/health/live").status_code == ask.get("/v2/health/ready").status_code == 200
    metadata = ask.get("/v2/models/scaled").json()
    assert metadata["versions"] == ["1", "2"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}]
    assert ask.get("/v2/models/scaled/versions/1/ready").json() == {"name": "scaled", "ready": True}
    answer = infer(ask, rows(), id="one").json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("one", "scaled", "2")
    assert answer["outputs"] == [{"name": "y", "shape": [2, 3], "datatype": "FP32", "data": [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]}]
    older = ask.post("/v2/models/scaled/versions/1/infer", json={"inputs": [rows()]}).json()
    assert older["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert ask.get("/v2/models/scaled/config").json()["max_batch_size"] == 8


def test_tensors_as_bytes(ask: httpx.Client):
    value = np.asarray(ROWS, "<f4")
    spec = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": value.nbytes}}
    head = json.dumps({"inputs": [spec], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = ask.post("/v2/models/scaled/infer", content=head + value.tobytes(), headers=headers)
    cut = int(answer.headers["inference-header-content-length"])
    described = json.loads(answer.content[:cut])["outputs"][0]
    assert described["parameters"] == {"binary_data_size": value.nbytes}
    np.testing.assert_array_equal(np.frombuffer(answer.content[cut:], "<f4").reshape(2, 3), 3 * value)


def test_a_body_of_nothing_but_bytes(ask: httpx.Client):
    """Triton's raw binary request: one row of the only input, and bytes come back."""
    row = np.asarray([1, 2, 3], "<f4")
    headers = {"Inference-Header-Content-Length": "0"}
    answer = ask.post("/v2/models/scaled/infer", content=row.tobytes(), headers=headers)
    cut = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:cut])["outputs"][0]["shape"] == [1, 3]
    np.testing.assert_array_equal(np.frombuffer(answer.content[cut:], "<f4"), 3 * row)
    for raw in (row.tobytes()[:-1], row.tobytes() * 2, b""):
        answer = ask.post("/v2/models/scaled/infer", content=raw, headers=headers)
        assert (answer.status_code, "has 12 bytes" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("change", "status", "problem"),
    [
        ({"name": "z"}, 400, "no input `z`"),
        ({"datatype": "FP64"}, 400, "is FP64, and this model takes FP32"),
        ({"shape": [2, 2]}, 400, "input `x` has shape [2, 2], and its data [2, 3]"),
        ({"shape": [2, 2], "data": [1.0] * 6}, 400, "has 4 values, and 6 were sent"),
        ({"shape": [3, 2], "data": [1.0] * 6}, 400, "has shape [3, 2], and this signature takes [batch, 3]"),
        ({"shape": [0, 3], "data": []}, 400, "is 0"),
        ({"shape": [0, 2**62], "data": []}, 400, "has too many numbers"),
        ({"data": None}, 400, "`data` is no list"),
        ({"parameters": 3}, 400, "parameters of input `x` are no object"),
        ({"parameters": {"shared_memory_region": "a"}}, 400, "shared memory"),
    ],
)
def test_what_does_not_fit_is_said_in_the_form_of_the_protocol(ask: httpx.Client, change: dict[str, Any], status: int, problem: str):
    answer = infer(ask, rows(**change))
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert problem in answer.json()["error"]


def test_other_refusals(ask: httpx.Client):
    assert infer(ask, rows(), model="nobody").status_code == 404
    wrong = {"id": 5, "parameters": [], "outputs": {}}
    for field, value in (*wrong.items(), ("parameters", {"binary_data_output": [1]}), ("outputs", [{}])):
        answer = infer(ask, rows(), **{field: value})
        assert (answer.status_code, field in answer.text or "`binary_data_output`" in answer.text) == (400, True), answer.text
    assert infer(ask, rows(), id=None, parameters=None, outputs=None).is_success
    missing = ask.post("/v2/models/scaled/versions/9/infer", json={"inputs": [rows()]})
    assert (missing.status_code, missing.json()["error"]) == (404, "model `scaled` has no version `9`; ready are 1, 2")
    late = infer(ask, rows(), parameters={"timeout": 10**400})
    assert (late.status_code, "microseconds" in late.text) == (400, True)
    assert "no signature `other`" in infer(ask, rows(), parameters={"signature": "other"}).json()["error"]
    assert "no output `z`" in infer(ask, rows(), outputs=[{"name": "z"}]).json()["error"]
    assert ask.post("/v2/models/scaled/infer", content=b"{").json()["error"].startswith("the body is not JSON")
    assert ask.post("/v2/models/scaled/infer", content=b"x" * 30_000).status_code == 413
    head = {"Inference-Header-Content-Length": "99999"}
    assert "99999" in ask.post("/v2/models/scaled/infer", content=b"{}", headers=head).json()["error"]
    assert list(ask.get("/v2/nothing").json()) == ["error"]
    assert ask.get("/v2", headers={"Host": "evil.example"}).status_code == 403
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
        assert ask.post("/v2/repository/index", headers={"Origin": origin}).status_code == status


def test_tensorflow_servings_rest(ask: httpx.Client):
    status = ask.get("/v1/models/scaled").json()["model_version_status"]
    assert [(entry["version"], entry["state"]) for entry in status] == [("2", "AVAILABLE"), ("1", "AVAILABLE")]
    described = ask.get("/v1/models/scaled/metadata").json()["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert described["inputs"]["x"]["dtype"] == "DT_FLOAT"
    expected = (3 * np.asarray(ROWS)).tolist()
    assert ask.post("/v1/models/scaled:predict", json={"instances": ROWS}).json() == {"predictions": expected}
    assert ask.post("/v1/models/scaled:predict", json={"instances": [{"x": row} for row in ROWS]}).json() == {"predictions": expected}
    assert ask.post("/v1/models/scaled:predict", json={"inputs": {"x": ROWS}}).json() == {"outputs": expected}
    labeled = ask.post("/v1/models/scaled/labels/stable:predict", json={"inputs": ROWS, "signature_name": "serving_default"})
    assert labeled.json() == {"outputs": (2 * np.asarray(ROWS)).tolist()}
    wrong = ask.post("/v1/models/scaled:predict", json={"instances": [[1, 2]]})
    assert (wrong.status_code, list(wrong.json())) == (400, ["error"])
    assert ask.post("/v1/models/scaled:predict", json={"rows": 1}).json()["error"].startswith("unknown field `rows`")
    assert ask.get("/v1/models/scaled/labels/canary").status_code == 404


def test_rows_for_a_signature_without_a_batch_compute_nothing(tmp_path: Path):
    argosy.export(lambda x: {"y": x.sum()}, (np.zeros((2, 3), np.float32),), tmp_path / "sum" / "1", platforms=["cpu"])
    with serving(tmp_path) as (url, _), httpx.Client(base_url=url) as ask:
        wrong = ask.post("/v1/models/sum:predict", json={"instances": ROWS})
        assert (wrong.status_code, "has no batch" in wrong.json()["error"]) == (400, True)
        assert ask.get("/v2/models/sum/stats").json()["model_stats"][0]["execution_count"] == 0
        assert ask.post("/v1/models/sum:predict", json={"inputs": ROWS}).json() == {"outputs": 21.0}
        (output,) = infer(ask, rows(), model="sum").json()["outputs"]
        assert output == {"name": "y", "shape": [], "datatype": "FP32", "data": [21.0]}


def test_metrics_and_statistics(ask: httpx.Client):
    infer(ask, rows())
    text = ask.get("/metrics").text
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count", "nv_inference_queue_duration_us"):
        assert f'{name}_total{{model="scaled",version="2"}}' in text
    (stats,) = ask.get("/v2/models/scaled/stats").json()["model_stats"]
    assert stats["inference_count"] >= 2
    assert stats["inference_stats"]["success"]["ns"] > 0
    # What Triton's clients read, and perf_analyzer cannot do without.
    parts = ("compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    assert set(stats["inference_stats"]) == {"success", "fail", "queue", *parts}
    assert all(set(part) == {"count", "ns"} for part in stats["inference_stats"].values())
    assert abs(stats["last_inference"] / 1e3 - time.time()) < 60


def test_versions_change_under_load_without_a_lost_request(tmp_path: Path):
    """Loaded, replaced and removed while clients ask: every answer is that of one version."""
    write_scaled(tmp_path / "models" / "m" / "1", 1.0)
    staged = {2: write_scaled(tmp_path / "staged2", 2.0), 3: write_scaled(tmp_path / "staged3", 3.0)}
    with serving(tmp_path / "models", "poll=0.05") as (address, _):
        wrong: list[Any] = []
        seen: set[float] = set()
        stop = threading.Event()

        def client() -> None:
            with httpx.Client(base_url=address, timeout=30) as ask:
                while not stop.is_set():
                    answer = infer(ask, rows(), model="m")
                    data = answer.json()["outputs"][0]["data"] if answer.is_success else []
                    factors = {y / x for y, x in zip(data, [x for row in ROWS for x in row], strict=False)}
                    if len(factors) != 1 or not answer.is_success:
                        wrong.append(answer.text)
                    seen.update(factors)

        clients = [threading.Thread(target=client) for _ in range(4)]
        for thread in clients:
            thread.start()
        with httpx.Client(base_url=address, timeout=30) as ask:
            for number, path in staged.items():
                while number - 1.0 not in seen and not wrong:
                    time.sleep(0.01)
                # Copied file by file, the manifest last or not: a version is taken when all of it is there.
                shutil.copytree(path, tmp_path / "models" / "m" / str(number))
                until = time.monotonic() + 30
                while ask.get("/v2/models/m").json()["versions"] != [str(number)]:
                    assert time.monotonic() < until
                    time.sleep(0.02)
            for _ in range(5):
                assert ask.post("/v2/repository/models/m/load").json() == {}
        while 3.0 not in seen and not wrong:
            time.sleep(0.01)
        stop.set()
        for thread in clients:
            thread.join()
        assert wrong == []
        assert seen == {1.0, 2.0, 3.0}


def test_a_version_that_is_asked_for_is_never_answered_by_another(tmp_path: Path):
    """Let go between its lookup and its batch, it is gone; the newest in its place answers those that named none."""
    for number in (1, 2):
        write_scaled(tmp_path / "m" / str(number), float(number))
    (tmp_path / "m" / "config.yml").write_text("versions: [1]\n")
    repository = Repository(tmp_path, PredictSettings(), PredictMetrics(), lambda _: None)
    repository.look()
    service = PredictService(repository)
    old = repository.find("m")
    (tmp_path / "m" / "config.yml").write_text("versions: [2]\n")
    repository.look()

    async def ask(version: str | None) -> tuple[int, Any]:
        lookups = [old]

        def find() -> Any:
            return lookups.pop() if lookups else service.find("m", version)

        async def connected() -> Any:
            await asyncio.sleep(60)

        request = Request({"type": "http"}, connected)
        loaded, result = await service.call(request, find, {"x": np.ones((1, 3), np.float32)}, None)
        return loaded.version, result.outputs["y"].tolist()

    try:
        assert asyncio.run(ask(None)) == (2, [[2.0, 2.0, 2.0]])
        with pytest.raises(ApiError, match="has no version `1`") as caught:
            asyncio.run(ask("1"))
        assert caught.value.status == 404
    finally:
        repository.close()


def test_a_damaged_version_is_refused_by_name_and_the_loaded_one_stays(tmp_path: Path):
    write_scaled(tmp_path / "m" / "1", 1.0)
    write_scaled(tmp_path / "m" / "2", 2.0)
    program = next((tmp_path / "m" / "2" / "programs").iterdir())
    raw = bytearray(program.read_bytes())
    raw[len(raw) // 2] ^= 1
    program.write_bytes(raw)
    (tmp_path / "m" / "config.yml").write_text("versions: all\n")
    with serving(tmp_path) as (address, log), httpx.Client(base_url=address, timeout=30) as ask:
        assert any("m version 2 is not loaded" in line and program.name in line for line in log)
        assert ask.get("/v2/models/m").json()["versions"] == ["1"]
        refused = ask.post("/v2/models/m/versions/2/infer", json={"inputs": [rows()]})
        assert refused.status_code == 503
        assert "not ready" in refused.json()["error"]
        states = {entry["version"]: entry["state"] for entry in ask.post("/v2/repository/index").json()}
        assert states == {"1": "READY", "2": "UNAVAILABLE"}
        assert ask.post("/v2/repository/models/m/unload").json() == {}
        assert infer(ask, rows(), model="m").status_code == 503
        assert ask.get("/v2/models/m/ready").status_code == 503
        assert ask.post("/v2/repository/models/m/load").json() == {}
        assert infer(ask, rows(), model="m").is_success
        assert "not in the repository" in ask.post("/v2/repository/models/none/load").json()["error"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "has no bundle"),
        (["host=0.0.0.0"], "lets everybody on the network"),
        (["http_port=1"], "did you mean `port`?"),
        (["grpc_port=8001"], "did you mean `grpc`?"),
        (["--grpc-address", "0.0.0.0"], "gRPC listens on `host`"),
        (["batching.max_batch_size=0"], "max_batch_size"),
    ],
)
def test_mistakes_are_said_before_a_server_starts(words: list[str], problem: str, tmp_path: Path):
    command = [sys.executable, "-m", "argosy", "predict", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 2
    assert problem in done.stderr


def test_images_by_openais_client(tmp_path: Path):
    """A bundle of a small Stable Diffusion draws what its pipeline draws."""
    pipe = argosy.load(write_pipeline(Path(__file__).parents[1] / "goldens" / "images" / "pipeline-sd", tmp_path / "pipeline"))
    options = {"steps": 2, "size": 16}
    pipe.export(tmp_path / "models" / "small" / "1", platforms=["cpu"], batch=[2], **options)
    write_scaled(tmp_path / "models" / "scaled" / "1", 2.0)
    expected = pipe.images("a red fox", negative="snow", guidance=3.0, seed=2**32 - 2, n=2, **options)
    extra = {"negative_prompt": "snow", "guidance_scale": 3.0, "seed": 2**32 - 2}
    with (
        serving(tmp_path / "models", "warm_up=false") as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for model in ({"model": "small"}, {}):
            response = client.images.generate(prompt="a red fox", n=2, size="16x16", extra_body=extra, **model)
            images = [read_image(base64.b64decode(image.b64_json)) for image in response.data]
            assert np.abs(np.stack(images).astype(int) - expected).max() <= 1
        different = client.images.generate(model="small", prompt="a red fox")
        assert different.data[0].b64_json != client.images.generate(model="small", prompt="a red fox").data[0].b64_json
        for words, why in (
            ({"size": "32x32"}, "exported for 16x16"),
            ({"n": 11}, "allows 10"),
            ({"model": "scaled"}, "draws no images of prompts"),
            ({"prompt": "a red fox in the snow " * 30}, "more tokens than"),
            ({"extra_body": {"num_inference_steps": 9}}, "num_inference_steps"),
            ({"stream": True}, "stream"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                client.images.generate(**{"model": "small", "prompt": "a red fox"} | words)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.images.generate(model="other", prompt="a red fox")


@pytest.mark.slow
def test_control_images_by_openais_client(tmp_path: Path):
    """A bundle with a ControlNet draws what its pipeline draws from the same control image, of any size."""
    goldens = Path(__file__).parents[1] / "goldens" / "images"
    pipe = argosy.load(write_pipeline(goldens / "pipeline-sd-controlnet", tmp_path / "pipeline"))
    how = {"steps": 2, "size": 16}
    pipe.export(tmp_path / "models" / "edges" / "1", platforms=["cpu"], batch=[2], **how)
    write_scaled(tmp_path / "models" / "scaled" / "1", 2.0)
    control = np.random.default_rng(0).integers(0, 256, (20, 24, 3)).astype(np.uint8)
    file = base64.b64encode(png_bytes(control)).decode()
    large = base64.b64encode(png_bytes(np.zeros((2049, 4096, 3), np.uint8))).decode()
    control_how: dict[str, Any] = {"control_image": resize_image(control, 16, 16), "control_scale": 0.5}
    expected = pipe.images("a red fox", guidance=3.0, seed=5, n=2, **control_how, **how)
    with (
        serving(tmp_path / "models") as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        extra = {"control_image": f"data:image/png;base64,{file}", "control_scale": 0.5, "guidance_scale": 3.0, "seed": 5}
        found = client.images.generate(prompt="a red fox", n=2, extra_body=extra)
        images = [read_image(base64.b64decode(one.b64_json)) for one in found.data]
        assert np.abs(np.stack(images).astype(int) - expected).max() <= 1
        # Opacity is ignored, as `argosy generate` and `argosy serve` do.
        clear = np.concatenate([control, np.full((20, 24, 1), 40, np.uint8)], -1)
        extra["control_image"] = base64.b64encode(image_file(clear)).decode()
        found = client.images.generate(prompt="a red fox", n=2, extra_body=extra)
        images = [read_image(base64.b64decode(one.b64_json)) for one in found.data]
        assert np.abs(np.stack(images).astype(int) - expected).max() <= 1
        for more, why in (
            ({}, "needs the image that its ControlNet follows"),
            ({"control_image": [file, file]}, "needs the image that its ControlNet follows"),
            ({"control_image": "AAAA"}, "`control_image`: no image that can be read"),
            ({"control_image": large}, "`control_image`: an image of 4096x2049 pixels, this server allows 8388608 pixels"),
            ({"control_image": file, "negative_prompt": "a" * 32769}, "`negative_prompt`: 32769 characters, this server allows 32768"),
            ({"control_image": file, "control_scale": [1.0, 1.0]}, "2 of them for 1 ControlNet"),
            ({"control_image": file, "control_scale": 101.0}, "0 to 100"),
            ({"control_image": file, "control_mode": 1}, "has no effect on a ControlNet of one kind"),
            ({"control_image": file, "control_start": 0.5}, "control_start"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                client.images.generate(prompt="a red fox", extra_body=more)


def test_embeddings_by_openais_client(tmp_path: Path):
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522})
    lm = LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt"))))
    lm.save(tmp_path / "model")
    write_steps(tmp_path / "model", EmbeddingSteps("mean", prompts={"query": "query: "}, include_prompt=False), config.width)
    argosy.load(tmp_path / "model").export(tmp_path / "models" / "small" / "1", platforms=["cpu"])
    repository = tmp_path / "models"
    texts = ["a boat", "a ship on the sea", "rain"]
    bundle = Bundle.open(repository / "small" / "1")
    expected, after = (bundle.run({"text": texts} | prompt_fields)["embedding"] for prompt_fields in ({}, {"prompt_name": "query"}))
    with serving(repository, "warm_up=false") as (address, _), openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["small"]
        response = client.embeddings.create(model="small", input=texts)
        np.testing.assert_allclose([entry.embedding for entry in response.data], expected, atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.embeddings.create(model="other", input=texts)
        response = client.embeddings.create(model="small", input=texts, extra_body={"prompt_name": "query"})
        np.testing.assert_allclose([entry.embedding for entry in response.data], after, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="no prompt `querry`"):
            client.embeddings.create(model="small", input=texts, extra_body={"prompt_name": "querry"})
        inputs = [{"name": "text", "shape": [3], "datatype": "BYTES", "data": texts},
                 {"name": "prompt_name", "shape": [1], "datatype": "BYTES", "data": ["query"]}]  # fmt: skip
        tensors = httpx.post(f"{address}/v2/models/small/infer", json={"inputs": inputs}, timeout=30).json()["outputs"]
        np.testing.assert_allclose(np.reshape(tensors[0]["data"], after.shape), after, atol=1e-5)
        by_parameter = {"inputs": inputs[:1], "parameters": {"prompt_name": "query"}}
        assert httpx.post(f"{address}/v2/models/small/infer", json=by_parameter, timeout=30).json()["outputs"] == tensors
        for change, why in (({"inputs": inputs}, "one of them"), ({"parameters": {"prompt_name": "querry"}}, "no prompt `querry`"),
                            ({"parameters": {"prompt_name": 1}}, "is no name")):  # fmt: skip
            refused = httpx.post(f"{address}/v2/models/small/infer", json=by_parameter | change, timeout=30)
            assert (refused.status_code, why in refused.json()["error"]) == (400, True)
        ranked = httpx.post(f"{address}/rerank", json={"query": texts[0], "documents": texts[1:]}, timeout=30).json()["results"]
        cosines = at_unit_length(expected[1:]) @ at_unit_length(after[:1])[0]
        assert sorted(entry["relevance_score"] for entry in ranked) == pytest.approx(sorted(cosines.tolist()), rel=1e-4)
        # A vector is no list of classes.
        vector = httpx.post(f"{address}/v1/models/small:classify", json={"examples": [{"text": texts[0]}]}, timeout=30)
        assert (vector.status_code, "no single output of scores" in vector.json()["error"]) == (400, True)
