"""The Open Inference Protocol over gRPC: messages against those of Triton's client, calls against a server."""

import asyncio
import datetime
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from predict_servers import grpc_address, serving, write_scaled

if os.environ.get("CI") != "true":
    pytest.importorskip("grpc", reason="gRPC is an extra: pip install 'argosy[grpc]'")

import grpc
from google.protobuf import descriptor_pb2

from argosy.core.errors import BadInput
from argosy.predict.grpc.messages import health_proto, inference_proto, read_request
from argosy.predict.metrics import PredictMetrics
from argosy.predict.protocol import InferenceProtocol
from argosy.predict.repository import Repository
from argosy.predict.service import PredictService
from argosy.predict.settings import PredictSettings
from argosy.predict.tensors import DATATYPES, to_bytes

GOLDEN = Path(__file__).parents[1] / "goldens" / "inference_proto.json"
MESSAGES = inference_proto().messages
ROWS = np.asarray([[1, 2, 3], [4, 5, 6]], np.float32)
LIMITS = ("limits.body=20000", "limits.upload_seconds=1")


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("proto", [inference_proto(), health_proto()], ids=lambda proto: proto.service)
def test_messages_are_those_of_other_clients(proto: Any):
    """Numbers and types of all fields, against tritonclient 2.73 and grpcio-health-checking 1.82."""
    golden = json.loads(GOLDEN.read_text())[proto.service.rpartition(".")[0]]
    seen = 0
    for name, message in proto.messages.items():
        descriptor = descriptor_pb2.DescriptorProto()
        message.DESCRIPTOR.CopyToProto(descriptor)
        for field in descriptor.field:
            number, kind, label, type_name, in_oneof = golden[name][field.name]
            assert (field.number, field.type, field.label) == (number, kind, label), f"{name}.{field.name}"
            assert field.type_name.rpartition(".")[2] == type_name
            assert field.HasField("oneof_index") == (in_oneof >= 0)
            seen += 1
        for enum in descriptor.enum_type:
            assert {value.name: value.number for value in enum.value} == golden[f"{name}.{enum.name}"]
    for enum in next(iter(proto.messages.values())).DESCRIPTOR.file.enum_types_by_name.values():
        assert {value.name: value.number for value in enum.values} == golden[enum.name]
    methods = golden[proto.service.rpartition(".")[2]]
    for name, method in proto.methods.items():
        kinds = [kind.DESCRIPTOR.name for kind in (method.request, method.response)]
        assert [*kinds, method.client_streams, method.server_streams] == methods[name]
        seen += 1
    assert seen > (100 if "inference" in proto.service else 3)


def request_of(*tensors: dict[str, Any], raw: list[bytes] = [], **more: Any) -> Any:  # noqa: B006
    """A `ModelInferRequest`. Keys of a tensor that are types' lists become its contents."""
    message = MESSAGES["ModelInferRequest"](model_name="scaled", raw_input_contents=raw, **more)
    for tensor in tensors:
        contents = {key: value for key, value in tensor.items() if key.endswith("_contents")}
        added = message.inputs.add(**{key: value for key, value in tensor.items() if key not in contents})
        if contents:
            added.contents.CopyFrom(MESSAGES["InferTensorContents"](**contents))
    return message


def tensor(shape: tuple[int, ...] = (2, 3), datatype: str = "FP32", name: str = "x", **contents: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype} | contents


@pytest.mark.parametrize("datatype", DATATYPES)
def test_numbers_go_through_bytes_and_typed_lists_unchanged(datatype: str):
    value = np.asarray([[0, 1], [1, 0]] if datatype == "BOOL" else [[1, 2], [3, 100]]).astype(DATATYPES[datatype])
    requests = [request_of(tensor((2, 2), datatype), raw=[to_bytes(value)[2]])]
    # As tritonclient and kserve write them.
    field = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}.get(datatype)
    field = field or {"I": "int", "U": "uint"}.get(datatype[0])
    if field is not None:
        requests.append(request_of(tensor((2, 2), datatype, **{f"{field}_contents": value.ravel().tolist()})))
    for request in requests:
        array = read_request(MESSAGES["ModelInferRequest"].FromString(request.SerializeToString())).arrays["x"]
        assert array.dtype == value.dtype
        np.testing.assert_array_equal(array, value)
    assert len(requests) == 2 or value.dtype in (np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (request_of(tensor(), raw=[b"0" * 23]), "has 24 bytes, and 23"),
        (request_of(tensor(), raw=[b"", b""]), "has 2 parts, and there are 1 inputs"),
        (request_of(tensor(fp32_contents=[1.0] * 6), raw=[b"0" * 24]), "has contents, and the request has raw"),
        (request_of(tensor(), tensor(), raw=[b"0" * 24] * 2), "two inputs"),
        (request_of(tensor((-1, 3)), raw=[b""]), "no list of sizes"),
        (request_of(tensor((1 << 40, 1 << 40)), raw=[b""]), "too many numbers"),
        (request_of(tensor(fp32_contents=[1.0] * 5)), "has 6 values, and 5"),
        (request_of(tensor(fp64_contents=[1.0] * 6)), "numbers are in fp32_contents, and it has fp64_contents"),
        (request_of(tensor(datatype="FP16")), "no typed contents"),
        (request_of(tensor(datatype="FP4")), "unknown datatype"),
        (request_of(tensor((1,), "INT8", int_contents=[300])), "outside INT8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(request_: Any, problem: str):
    with pytest.raises(BadInput, match=problem):
        read_request(request_)


# ---------------------------------------------------------------- a server


class Client:
    """Calls by method name."""

    def __init__(self, channel: grpc.Channel, *metadata: tuple[str, str]):
        self.channel, self.metadata = channel, metadata

    def call(self, name: str, request: Any = None, /, proto: Any = None, timeout: float = 30, **fields: Any) -> Any:
        proto = proto or inference_proto()
        method = proto.methods[name]
        send = self.channel.unary_unary(
            f"/{proto.service}/{name}", lambda message: message.SerializeToString(), method.response.FromString
        )
        return send(request or method.request(**fields), timeout=timeout, metadata=self.metadata)

    def infer(self, **more: Any) -> Any:
        return self.call("ModelInfer", request_of(tensor(), raw=[ROWS.tobytes()], **more))

    def refusal(self, name: str, request: Any = None, /, **more: Any) -> tuple[grpc.StatusCode, str]:
        """Code and message of a call that fails."""
        with pytest.raises(grpc.RpcError) as error:
            self.call(name, request, **more)
        return error.value.code(), error.value.details()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_scaled(folder / "scaled" / "1", 2.0)
    write_scaled(folder / "scaled" / "2", 3.0)
    (folder / "scaled" / "config.yml").write_text("versions: all\nbatching: {max_batch_size: 8}\n")
    write_scaled(folder / "slow" / "1", 1.0)
    # The first request of a batch waits so long for others.
    (folder / "slow" / "config.yml").write_text("batching: {max_queue_delay_ms: 1500}\n")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[tuple[str, str]]:
    with serving(repository, "grpc=0", *LIMITS) as (url, log):
        yield url, grpc_address(log)


@pytest.fixture(scope="module")
def client(server: tuple[str, str]) -> Iterator[Client]:
    with grpc.insecure_channel(server[1]) as channel:
        yield Client(channel)


def test_methods_of_the_protocol(client: Client):
    assert client.call("ServerLive").live
    assert client.call("ServerReady").ready
    assert client.call("ServerMetadata").name == "argosy"
    for name, version, ready in (("scaled", "", True), ("scaled", "1", True), ("scaled", "9", False), ("x", "", False)):
        assert client.call("ModelReady", name=name, version=version).ready == ready
    metadata = client.call("ModelMetadata", name="scaled")
    assert list(metadata.versions) == ["1", "2"]
    assert [(spec.name, spec.datatype, list(spec.shape)) for spec in metadata.inputs] == [
        ("x", "FP32", [-1, 3])
    ]
    response = client.infer(id="one", model_version="1")
    assert (response.model_name, response.model_version, response.id) == ("scaled", "1", "one")
    assert [(spec.name, spec.datatype, list(spec.shape)) for spec in response.outputs] == [
        ("y", "FP32", [2, 3])
    ]
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], "<f4").reshape(2, 3), 2 * ROWS)
    typed = client.call("ModelInfer", request_of(tensor(fp32_contents=ROWS.ravel().tolist())))
    np.testing.assert_array_equal(np.frombuffer(typed.raw_output_contents[0], "<f4").reshape(2, 3), 3 * ROWS)
    assert typed.model_version == "2"


def test_extensions(client: Client):
    config = client.call("ModelConfig", name="scaled").config
    assert (config.name, config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == ("scaled", 8, 11, [3])
    client.infer()
    (statistics,) = client.call("ModelStatistics", name="scaled").model_stats
    assert statistics.inference_count >= 2
    assert statistics.inference_stats.success.ns > 0
    assert len(client.call("ModelStatistics").model_stats) == 3
    client.call("RepositoryModelUnload", model_name="scaled")
    index = client.call("RepositoryIndex").models
    assert {(entry.version, entry.state, entry.reason) for entry in index if entry.name == "scaled"} == {
        ("1", "UNAVAILABLE", "unloaded"), ("2", "UNAVAILABLE", "unloaded")
    }  # fmt: skip
    assert [entry.name for entry in client.call("RepositoryIndex", ready=True).models] == ["slow"]
    assert client.refusal("ModelInfer", request_of(tensor(), raw=[ROWS.tobytes()]))[0] is grpc.StatusCode.UNAVAILABLE
    client.call("RepositoryModelLoad", model_name="scaled")
    client.infer()
    code, message = client.refusal("RepositoryModelLoad", model_name="none")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "not in the repository" in message


@pytest.mark.parametrize(
    ("request_", "code", "problem"),
    [
        (request_of(tensor(name="z"), raw=[ROWS.tobytes()]), "INVALID_ARGUMENT", "no input `z`"),
        (request_of(tensor(datatype="FP64"), raw=[bytes(48)]), "INVALID_ARGUMENT", "is FP64, and this model takes FP32"),
        (request_of(tensor((3, 2)), raw=[ROWS.tobytes()]), "INVALID_ARGUMENT", "shape [3, 2]"),
        (request_of(tensor((0, 3)), raw=[b""]), "INVALID_ARGUMENT", "is 0"),
        (request_of(), "INVALID_ARGUMENT", "input `x` is missing"),
        (request_of(tensor(), raw=[ROWS.tobytes()], model_version="9"), "NOT_FOUND", "has no version `9`"),
        (request_of(tensor(), raw=[ROWS.tobytes()], outputs=[{"name": "z"}]), "INVALID_ARGUMENT", "no output `z`"),
        (request_of(tensor((5000, 3)), raw=[bytes(60_000)]), "RESOURCE_EXHAUSTED", "20000"),
    ],
)
def test_refusals_have_codes(client: Client, request_: Any, code: str, problem: str):
    refused = client.refusal("ModelInfer", request_)
    assert refused[0].name == code
    assert problem in refused[1]


def test_bytes_that_are_no_message_and_methods_that_there_are_not(client: Client):
    infer = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for raw in (b"\xff\xff\xff", b"\x2a\x05abc"):
        with pytest.raises(grpc.RpcError, match="no ModelInferRequest"):
            infer(raw, timeout=30)
    with pytest.raises(grpc.RpcError) as error:
        client.channel.unary_unary("/inference.GRPCInferenceService/TraceSetting")(b"", timeout=30)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    assert client.infer().model_version == "2"


def test_a_request_that_does_not_arrive_is_given_up(client: Client):
    stop = threading.Event()

    def requests() -> Iterator[bytes]:
        stop.wait(20)
        yield b""

    send = client.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError, match="took more than 1 seconds to arrive"):
        send(requests(), timeout=10)
    stop.set()


def test_the_work_of_a_deadline_that_passed_is_dropped(client: Client):
    """Canceled calls leave the queue: nothing of theirs is computed."""
    request = request_of(tensor(), raw=[ROWS.tobytes()])
    request.model_name = "slow"
    batches = client.call("ModelStatistics", name="slow").model_stats[0].execution_count
    assert client.refusal("ModelInfer", request, timeout=0.3)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    started = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(request.SerializeToString(), timeout=30)
    time.sleep(0.2)
    started.cancel()
    request.parameters["timeout"].int64_param = 200_000
    code, message = client.refusal("ModelInfer", request)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "took more than 0.2 seconds" in message
    time.sleep(1.5)
    assert client.call("ModelStatistics", name="slow").model_stats[0].execution_count == batches


def test_a_stream_answers_in_order_and_goes_on_after_an_error(client: Client):
    requests = [request_of(tensor(), raw=[(i * ROWS).astype(np.float32).tobytes()], id=str(i)) for i in range(100)]
    requests[7].inputs[0].name = "z"
    send = client.channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        lambda message: message.SerializeToString(),
        MESSAGES["ModelStreamInferResponse"].FromString,
    )
    responses = list(send(iter(requests), timeout=60))
    assert [response.infer_response.id for response in responses] == [str(i) for i in range(100)]
    assert [i for i, response in enumerate(responses) if response.error_message] == [7]
    assert "no input `z`" in responses[7].error_message
    for i in (0, 8, 99):
        value = np.frombuffer(responses[i].infer_response.raw_output_contents[0], "<f4").reshape(2, 3)
        np.testing.assert_array_equal(value, 3 * i * ROWS)


def test_more_calls_than_may_run_are_refused(repository: Path):
    request = request_of(tensor(), raw=[ROWS.tobytes()])
    request.model_name = "slow"
    words = ("grpc=0", "limits.connections=2", "warm_up=false")
    with serving(repository, *words) as (_, log), grpc.insecure_channel(grpc_address(log)) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        running = [infer.future(request.SerializeToString(), timeout=30) for _ in range(5)]
        codes = [call.code().name for call in running]
        assert sorted(codes) == ["OK"] * 2 + ["RESOURCE_EXHAUSTED"] * 3
        assert Client(channel).infer().model_version == "2"


def test_health(client: Client):
    for service in ("", "inference.GRPCInferenceService"):
        assert client.call("Check", proto=health_proto(), service=service).status == 1
    assert client.refusal("Check", proto=health_proto(), service="x")[0] is grpc.StatusCode.NOT_FOUND


def test_keys_tls_and_a_drain(repository: Path, tmp_path: Path):
    """What runs when the server is asked to end is answered, and health says that it ends."""
    key, certificate = write_certificate(tmp_path)
    words = (f"tls_certificate={certificate}", f"tls_key={key}", "api_key=secret", "grpc=0")
    request = request_of(tensor(), raw=[ROWS.tobytes()])
    request.model_name = "slow"
    with serving(repository, *words) as (url, log):
        assert url.startswith("https://")
        assert " and grpcs://127.0.0.1:" in log[-1]
        channel = grpc.secure_channel(grpc_address(log), grpc.ssl_channel_credentials(certificate.read_bytes()))
        client = Client(channel)
        assert client.call("ServerLive").live
        assert client.call("Check", proto=health_proto()).status == 1
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "Secret"),)):
            assert Client(channel, *metadata).refusal("ModelInfer", request)[0] is grpc.StatusCode.UNAUTHENTICATED
        for metadata in (("authorization", "Bearer secret"), ("x-api-key", "secret")):
            assert Client(channel, metadata).infer().model_name == "scaled"
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", None, health_proto().messages["HealthCheckResponse"].FromString)
        statuses = watch(b"", timeout=30)
        assert next(statuses).status == 1
        running = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
            request.SerializeToString(), timeout=30, metadata=(("x-api-key", "secret"),)
        )
        time.sleep(0.3)
    answer = MESSAGES["ModelInferResponse"].FromString(running.result(30))
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(2, 3), ROWS)
    assert [status.status for status in statuses] == [2]
    channel.close()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    built = built.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    (folder / "certificate.pem").write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return folder / "key.pem", folder / "certificate.pem"


def predict_words(*words: str, program: str = "from argosy.cli import main; sys.exit(main(sys.argv[1:]))") -> tuple[int, str]:
    command = [sys.executable, "-c", f"import sys; {program}", "predict", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return done.returncode, done.stderr


def test_without_the_package_nothing_is_loaded(repository: Path):
    program = "sys.modules['grpc'] = None; from argosy.cli import main; sys.exit(main(sys.argv[1:]))"
    code, stderr = predict_words(str(repository), "port=0", "grpc=0", program=program)
    assert code == 2
    assert "gRPC needs the package `grpcio`" in stderr
    assert "loading" not in stderr


def test_a_port_in_use_is_said(repository: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, stderr = predict_words(str(repository), "port=0", f"grpc={port}")
    assert code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in stderr
    assert "another `grpc=`" in stderr


def test_a_load_goes_on_when_its_client_has_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """And an error that nobody waits for is not printed."""
    write_scaled(tmp_path / "m" / "1", 1.0)
    repository = Repository(tmp_path, PredictSettings(warm_up=False), PredictMetrics(), lambda _: None)
    protocol = InferenceProtocol(PredictService(repository))

    async def leave(name: str) -> None:
        task = asyncio.ensure_future(protocol.load(name, {}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def both() -> None:
        await leave("m")
        await leave("none")
        for _ in range(500):
            if "m" in repository.models and repository.models["m"].versions:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    try:
        asyncio.run(both())
        assert repository.find("m").version == 1
        gc.collect()
        assert not caplog.records
    finally:
        repository.close()
