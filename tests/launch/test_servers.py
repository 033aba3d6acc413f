"""Manifests of servers beside the schemas of their resources, what is refused before they are written, and replicas on Ray Serve."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from predict.predict_servers import write_scaled

from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.core.settings.scalars import yaml_documents
from argosy.launch.rendered import Command
from argosy.launch.servers import kserve, kubernetes, ray_serve
from argosy.launch.servers.settings import KServe, Kubernetes
from argosy.predict.settings import PredictSettings

SCHEMAS = json.loads(Path(__file__).with_name("servers_schema.json").read_text())
FULL: dict[str, Any] = {"gpus": 1, "gpu": "nvidia-l4", "cpu": "500m", "memory": "4Gi", "namespace": "team"}
PREDICT = Command(("predict", "/models", "poll=5", "drain=60"), "")


def read_back(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As kubectl reads them."""
    return list(yaml.safe_load_all(yaml_documents(documents)))


def deployment(command: Command = PREDICT, **settings: Any) -> list[dict[str, Any]]:
    fields = {"image": "a/b:1", "volume": "claim", "secret": "keys"} | settings
    return read_back(kubernetes.render_deployment(command, Kubernetes(**fields)))


def runtime(words: tuple[str, ...] = ("predict", "/mnt/models"), **settings: Any) -> list[dict[str, Any]]:
    fields = {"image": "a/b:1", "storage": "gs://bucket/models", "secret": "keys"} | settings
    return read_back(kserve.render_runtime(Command(words, ""), KServe(**fields)))


@pytest.mark.parametrize("settings", [{}, FULL], ids=["plain", "full"])
def test_the_schemas_of_the_resources_take_them(settings: dict[str, Any]):
    resources = [*deployment(**settings), *runtime(**settings), *deployment(Command(("serve", "/models/llama"), ""), **settings)]
    assert [resource["kind"] for resource in resources] == [
        "Deployment",
        "Service",
        "ServingRuntime",
        "InferenceService",
        "Deployment",
        "Service",
    ]
    for resource in resources:
        jsonschema.validate(resource, SCHEMAS[resource["kind"]])


def test_the_schemas_find_wrong_fields_and_types():
    deployed, service = deployment()
    deployed["spec"]["replica"] = 3
    pod = deployed["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = "70"
    pod["containers"][0]["readinessProbe"]["httpGet"]["path"] = 7
    assert len(list(jsonschema.Draft7Validator(SCHEMAS["Deployment"]).iter_errors(deployed))) == 3
    del service["spec"]["ports"][0]["port"]
    assert len(list(jsonschema.Draft7Validator(SCHEMAS["Service"]).iter_errors(service))) == 1


def test_pods_listen_answer_probes_and_have_time_to_drain():
    deployed, service = deployment(replicas=3)
    pod = deployed["spec"]["template"]["spec"]
    container = pod["containers"][0]
    words = container["command"]
    assert words[:3] == ["argosy", "predict", "/models"]
    assert {"host=0.0.0.0", "port=8000", "poll=5"} <= set(words)
    assert pod["terminationGracePeriodSeconds"] == 70
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8000}
    assert container["env"] == [{"name": "ARGOSY_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api-key"}}}]
    assert deployed["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert (
        service["spec"]["selector"] == deployed["spec"]["selector"]["matchLabels"] == deployed["spec"]["template"]["metadata"]["labels"]
    )
    chat = deployment(Command(("serve", "/models/llama"), ""))[0]["spec"]["template"]["spec"]["containers"][0]
    assert chat["readinessProbe"]["httpGet"]["path"] == "/health"


def test_pods_with_tls_are_probed_by_tls_and_grpc_has_a_port():
    words = ("predict", "/models", "tls_certificate=/tls/c.pem", "tls_key=/tls/k.pem", "grpc=8001")
    deployed, service = deployment(Command(words, ""))
    container = deployed["spec"]["template"]["spec"]["containers"][0]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["scheme"] for probe in probes] == ["HTTPS"] * 3
    assert [port["containerPort"] for port in container["ports"]] == [8000, 8001]
    names = {port["name"] for port in container["ports"]}
    assert [(port["port"], port["targetPort"] in names) for port in service["spec"]["ports"]] == [(8000, True), (8001, True)]
    for resource in (deployed, service):
        jsonschema.validate(resource, SCHEMAS[resource["kind"]])


def test_kserve_asks_for_the_model_by_the_name_of_its_service():
    serving, service = runtime(name="minilm", min_replicas=0, max_replicas=4)
    container = serving["spec"]["containers"][0]
    assert container["name"] == "kserve-container"
    assert "name={{.Name}}" in container["command"]
    assert service["spec"]["predictor"]["model"]["runtime"] == serving["metadata"]["name"]
    assert service["spec"]["predictor"]["minReplicas"] == 0


@pytest.mark.parametrize(
    "words, settings, message",
    [
        (("predict", "/models", "port=80"), {}, "port= in the command"),
        (("predict", "/models", "api_key=x"), {}, "api_key= in the command"),
        (("predict", "/models", "grpc=0"), {}, "grpc=0 in the command"),
        (("predict", "/models", "grpc=8000"), {}, "grpc=8000 in the command"),
        (("predict", "/models"), {"secret": None}, "anybody in the cluster"),
        (("predict", "/models", "open=true"), {}, "secret= and open=true"),
        (("predict", "/elsewhere"), {}, "not in mount=/models"),
        (("predict", "models"), {"volume": None}, "a folder of this machine"),
    ],
)
def test_what_pods_cannot_do_is_refused(words: tuple[str, ...], settings: dict[str, Any], message: str):
    with pytest.raises(BadInput, match=message):
        deployment(Command(words, ""), **settings)


def test_kserve_has_its_own_place_for_models():
    with pytest.raises(BadInput, match="puts models at /mnt/models"):
        runtime(("predict", "/models"))
    with pytest.raises(BadInput, match="runs `predict`"):
        runtime(("serve", "/mnt/models"))
    for setting in ("grpc=8001", "tls_key=/k.pem"):
        with pytest.raises(BadInput, match=f"{setting.partition('=')[0]}= in the command"):
            runtime(("predict", "/mnt/models", setting))


def test_a_manifest_is_written_by_the_command_line(tmp_path: Path):
    file = tmp_path / "k8s.yml"
    words = ["launch", "engine=kubernetes", "image=a/b:1", "volume=claim", "secret=keys", f"write={file}", "--"]
    assert main([*words, "predict", "/models", "poll=5"]) == 0
    assert [resource["kind"] for resource in yaml.safe_load_all(file.read_text())] == ["Deployment", "Service"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["engine=kubernetes", "image=a", "secret=k", "--", "predict", "/models", "portt=3"], "unknown setting `portt`"),
        (["engine=kubernetes", "image=a", "replica=2", "--", "predict", "/models"], "unknown setting `replica`"),
        (["engine=kserve", "image=a", "storage=x", "--", "predict", "/mnt/models"], "no address such as gs://"),
        (["engine=kubernetes", "image=a", "--", "train", "tiny"], "cannot run `train`"),
        (["engine=rayserve", "--", "predict", "/models", "port=0"], "port=0 with engine=rayserve"),
        (["engine=rayserve", "--", "predict", "/models", "tls_key=a"], "tls_key with engine=rayserve"),
        (["processes=2", "--", "predict", "/models"], "no such folder: `/models`"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["launch", *words]) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert out.out == ""


def test_replicas_refuse_what_would_reach_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The application that Ray Serve runs, here in this process."""
    from argosy.jobs import machine
    from argosy.jobs.replicas import replica_app

    monkeypatch.setattr(machine, "programs_folder", lambda: None)
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    transport = httpx.ASGITransport(replica_app(str(tmp_path), PredictSettings(open=True).model_dump()))

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
            return [
                await client.post("/v2/models/scaled/infer", json=body),
                await client.post("/v2/repository/models/scaled/unload", json={}),
                await client.post("/v2/repository/models/scaled/load", json={}),
                await client.get("/v2/models/scaled/ready"),
            ]

    right, unload, load, ready = asyncio.run(ask())
    assert right.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0]
    assert unload.status_code == load.status_code == 400
    assert "poll=SECONDS" in unload.json()["error"]
    assert ready.status_code == 200


def test_replicas_of_a_chat_server_are_refused():
    with pytest.raises(BadInput, match="runs `predict`"):
        ray_serve.check_replicated(Command(("serve", "/models"), ""), PredictSettings())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_replicas_on_a_real_ray_answer_and_drain(tmp_path: Path):
    write_scaled(tmp_path / "models" / "scaled" / "1", 2.0)
    words = ["launch", "engine=rayserve", "replicas=2", "cpus=1", "--", "predict", str(tmp_path / "models"), "port=8497"]
    command = [sys.executable, "-m", "argosy", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert process.stderr is not None
    try:
        output = []
        for line in process.stderr:
            output.append(line)
            if line.startswith("ready on "):
                break
        else:
            raise AssertionError("".join(output))
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
        with httpx.Client(base_url="http://127.0.0.1:8497", timeout=60) as client:
            for _ in range(20):
                assert client.post("/v2/models/scaled/infer", json=body).json()["outputs"][0]["data"] == [2.0, 4.0, 6.0]
            assert client.post("/v2/repository/models/scaled/unload", json={}).status_code == 400
            assert client.post("/v2/models/none/infer", json=body).status_code == 404
    finally:
        process.terminate()
        start = time.monotonic()
        code = process.wait(90)
        process.stderr.close()
    assert code == 143
    assert time.monotonic() - start < 60
