"""Triton's and KServe's clients, unmodified, against a server of bundles.

    python3 -m venv clients; clients/bin/pip install "tritonclient[http,grpc]" kserve ml_dtypes
    ./run python tests/campaign_clients.py python=clients/bin/python

Writes models that return what they get, in each type, an encoder of texts and an ensemble, starts a server, and runs this file again in
the environment of the clients. Prints a line for each check; exit code 1 where one failed.
"""

import asyncio
import logging
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "bfloat16")
TYPES = {
    "bool": "BOOL", "int8": "INT8", "int16": "INT16", "int32": "INT32", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32",
    "float16": "FP16", "float32": "FP32", "bfloat16": "BF16",
}  # fmt: skip
TEXTS = ["a boat", "a ship on the sea", "", "déjà vu"]
X = np.asarray([[1, 0, 3], [4, 5, 0]])


# ---------------------------------------------------------------- the server's side


def write_models(folder: Path) -> None:
    import jax.numpy as jnp
    from helpers import shared

    import argosy
    from argosy.data.tokenizers.load import find_tokenizer
    from argosy.infer.lm import LM
    from argosy.models import FAMILIES
    from argosy.weights.build import random_model

    for name in NAMES:
        example = jnp.zeros((1, 3), name)
        argosy.export(lambda x: {"y": jnp.copy(x)}, (example,), folder / name / "1", platforms=["cpu"], batch="symbolic")
    argosy.export(lambda x: {"y": 2 * x}, (jnp.zeros((1, 3)),), folder / "float32" / "2", platforms=["cpu"], batch="symbolic")
    (folder / "float32" / "config.yml").write_text("versions: all\nlabels: {stable: 1}\n")
    (folder / "twice").mkdir()
    steps = '[{"model": "float32", "output_map": {"y": "h"}}, {"model": "float32", "input_map": {"x": "h"}}]'
    (folder / "twice" / "config.yml").write_text(f"ensemble: {{steps: {steps}}}\n")
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522})
    LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))).save(folder / "hub")
    argosy.load(folder / "hub").export(folder / "encoder" / "1", platforms=["cpu"])


def main() -> int:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "predict")]
    from predict_servers import grpc_address, serving

    from argosy.export.bundle import Bundle

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        np.save(folder / "vectors.npy", Bundle.open(folder / "encoder" / "1").run({"text": ["a boat", "rain"]})["embedding"])
        with serving(folder, "warm_up=false", "grpc=0") as (url, log):
            rest = [url.partition("://")[2], grpc_address(log), str(folder / "vectors.npy")]
            # Apart: a process takes the generated messages of only one of them.
            command = [words["python"], __file__, "--client"]
            return max(subprocess.run([*command, library, *rest], check=False).returncode for library in ("triton", "kserve"))


# ---------------------------------------------------------------- the clients' side


def values(kind: str) -> np.ndarray:
    """What a model of this type is sent."""
    import ml_dtypes

    return X.astype(getattr(ml_dtypes, kind, kind))


def check_refused(problem: str, call: Callable[[], Any], status: str | None = None) -> None:
    """The call fails with the client's own exception, whose message has these words."""
    from tritonclient.utils import InferenceServerException

    caught = None
    try:
        call()
    except InferenceServerException as error:
        caught = error
    assert caught is not None, "it was not refused"
    assert problem in (caught.message() or ""), caught
    assert status is None or status in str(caught.status()), caught.status()


def triton_cases(module: Any, client: Any, vectors: np.ndarray) -> dict[str, Callable[[], None]]:
    """Checks of `tritonclient.http` and `tritonclient.grpc`, whose clients have the same methods."""
    is_http = "http" in module.__name__

    def tensor(name: str, value: np.ndarray, kind: str, **options: Any) -> Any:
        tensor_input = module.InferInput(name, list(value.shape), kind)
        tensor_input.set_data_from_numpy(value, **options)
        return tensor_input

    def plain(value: Any) -> Any:
        """What gRPC gives as a message, as a dict."""
        if is_http:
            return value
        from google.protobuf.json_format import MessageToDict

        return MessageToDict(value, preserving_proto_field_name=True)

    def answers(kind: str, **options: Any) -> None:
        value = values(kind)
        result = client.infer(kind, [tensor("x", value, TYPES[kind], **options)], model_version="1", request_id="seven")
        np.testing.assert_array_equal(result.as_numpy("y"), value)
        head = plain(result.get_response())
        assert (head["id"], head["model_name"], head["model_version"]) == ("seven", kind, "1")

    def types() -> None:
        for kind in NAMES:
            answers(kind)

    def types_in_json() -> None:
        for kind in NAMES:
            if kind not in ("float16", "bfloat16"):
                value = values(kind)
                outputs = [module.InferRequestedOutput("y", binary_data=False)]
                result = client.infer(kind, [tensor("x", value, TYPES[kind], binary_data=False)], model_version="1", outputs=outputs)
                np.testing.assert_array_equal(result.as_numpy("y"), value)

    def texts() -> None:
        value = np.asarray(["a boat", "rain"], object)
        for options in ({}, {"binary_data": False}) if is_http else ({},):
            result = client.infer("encoder", [tensor("text", value, "BYTES", **options)])
            np.testing.assert_allclose(result.as_numpy("embedding"), vectors, atol=1e-5)
        raw = np.asarray([b"a boat", b"\xff\xfe"], object)
        check_refused("UTF-8", lambda: client.infer("encoder", [tensor("text", raw, "BYTES")]))

    def ensemble() -> None:
        result = client.infer("twice", [tensor("x", values("float32"), "FP32")])
        np.testing.assert_array_equal(result.as_numpy("y"), 4 * values("float32"))
        config = plain(client.get_model_config("twice"))
        config = config if is_http else config["config"]
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["float32", "float32"]

    def life() -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("float32")
        assert client.is_model_ready("float32", "1")
        assert not client.is_model_ready("float32", "9")
        assert not client.is_model_ready("wrong")

    def descriptions() -> None:
        assert plain(client.get_server_metadata())["name"] == "argosy"
        metadata = plain(client.get_model_metadata("float32"))
        assert metadata["versions"] == ["1", "2"]
        (tensor_described,) = metadata["inputs"]
        assert (tensor_described["name"], tensor_described["datatype"], [int(n) for n in tensor_described["shape"]]) == (
            "x",
            "FP32",
            [-1, 3],
        )
        config = plain(client.get_model_config("float32"))
        config = config if is_http else config["config"]
        assert (config["name"], config["max_batch_size"], config["input"][0]["data_type"]) == ("float32", 32, "TYPE_FP32")

    def statistics() -> None:
        (model_stats,) = plain(client.get_inference_statistics("float32", "1"))["model_stats"]
        before = int(model_stats["inference_count"])
        client.infer("float32", [tensor("x", values("float32"), "FP32")], model_version="1")
        (model_stats,) = plain(client.get_inference_statistics("float32", "1"))["model_stats"]
        assert int(model_stats["inference_count"]) == before + 2
        assert int(model_stats["inference_stats"]["success"]["count"]) > 0
        assert len(plain(client.get_inference_statistics())["model_stats"]) == len(NAMES) + 3

    def repository() -> None:
        def index() -> dict[tuple[str, str], str]:
            repository_index = plain(client.get_model_repository_index())
            return {
                (entry["name"], entry["version"]): entry["state"]
                for entry in (repository_index if is_http else repository_index["models"])
            }

        assert index()["uint8", "1"] == "READY"
        client.unload_model("uint8")
        assert index()["uint8", "1"] == "UNAVAILABLE"
        assert not client.is_model_ready("uint8")
        check_refused("not ready", lambda: answers("uint8"))
        client.load_model("uint8")
        answers("uint8")
        client.unload_model("twice", unload_dependents=True)
        assert not client.is_model_ready("float32")
        client.load_model("twice")
        assert client.is_model_ready("float32")
        check_refused("not in the repository", lambda: client.load_model("wrong"))
        check_refused("takes no parameters", lambda: client.load_model("uint8", config='{"max_batch_size": 3}'))
        check_refused("unknown model", lambda: client.unload_model("wrong"))

    def errors() -> None:
        value, kinds = values("float32"), ("400", "404") if is_http else ("INVALID_ARGUMENT", "NOT_FOUND")
        infer = client.infer
        check_refused("unknown model", lambda: infer("wrong", [tensor("x", value, "FP32")]), kinds[1])
        check_refused("has no version", lambda: infer("float32", [tensor("x", value, "FP32")], model_version="7"), kinds[1])
        check_refused("no input `z`", lambda: infer("float32", [tensor("z", value, "FP32")]), kinds[0])
        check_refused("is missing", lambda: infer("float32", []), kinds[0])
        check_refused("this model takes FP32", lambda: infer("float32", [tensor("x", value.astype(np.int32), "INT32")]), kinds[0])
        check_refused("shape [2, 2]", lambda: infer("float32", [tensor("x", value[:, :2].copy(), "FP32")]), kinds[0])
        outputs = [module.InferRequestedOutput("z")]
        check_refused("no output `z`", lambda: infer("float32", [tensor("x", value, "FP32")], outputs=outputs), kinds[0])
        shared = module.InferInput("x", [2, 3], "FP32")
        shared.set_shared_memory("region", 24)
        check_refused("shared memory", lambda: infer("float32", [shared]), kinds[0])
        check_refused("", lambda: client.get_system_shared_memory_status())
        check_refused("", lambda: client.get_trace_settings())
        check_refused("", lambda: client.get_log_settings())

    def classes() -> None:
        outputs = [module.InferRequestedOutput("y", class_count=2)]
        result = client.infer("float32", [tensor("x", values("float32"), "FP32")], model_version="1", outputs=outputs)
        best = [[text.decode().split(":") for text in row] for row in result.as_numpy("y")]
        assert [[(float(value), int(i)) for value, i in row] for row in best] == [[(3, 2), (1, 0)], [(5, 1), (4, 0)]]

    def parameters() -> None:
        value = values("float32")
        options = {"priority": 0, "timeout": 5_000_000, "sequence_id": 0, "parameters": {"mine": "x", "signature": "call"}}
        result = client.infer("float32", [tensor("x", value, "FP32")], headers={"x-trace": "1"}, **options)
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * value)

    def compression() -> None:
        value = values("float32")
        ways: list[dict[str, Any]] = [{"compression_algorithm": "gzip"}, {"compression_algorithm": "deflate"}]
        if is_http:
            ways = [{"request_compression_algorithm": a, "response_compression_algorithm": b} for a, b in (
                ("gzip", None), ("deflate", None), (None, "gzip"), ("gzip", "deflate"))]  # fmt: skip
        for way in ways:
            result = client.infer("float32", [tensor("x", value, "FP32")], **way)
            np.testing.assert_array_equal(result.as_numpy("y"), 2 * value)

    def many() -> None:
        """Calls that are started without waiting."""
        value = values("float32")
        if is_http:
            waiting = [client.async_infer("float32", [tensor("x", i * value, "FP32")]) for i in range(50)]
            results = [pending.get_result() for pending in waiting]
        else:
            import queue

            done: queue.Queue[Any] = queue.Queue()
            client.start_stream(callback=lambda result, error: done.put((result, error)))
            for i in range(50):
                client.async_stream_infer("float32", [tensor("x", i * value, "FP32")], request_id=str(i))
            pairs = [done.get(timeout=60) for _ in range(50)]
            client.async_stream_infer("wrong", [tensor("x", value, "FP32")])
            assert "unknown model" in str(done.get(timeout=60)[1])
            client.stop_stream()
            assert not [error for _, error in pairs if error is not None]
            results = [result for result, _ in pairs]
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result.as_numpy("y"), 2 * i * value)

    cases = [types, texts, ensemble, life, descriptions, statistics, repository, errors, classes, parameters, compression, many]
    return {case.__name__: case for case in [*cases, *([types_in_json] if is_http else [])]}


async def kserve_cases(http: str, grpc: str, vectors: np.ndarray) -> None:
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
    from kserve.inference_client import RESTConfig

    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    rpc = InferenceGRPCClient(grpc, retries=0)
    base = f"http://{http}"

    def request(model: str, value: np.ndarray, kind: str, name: str = "x", binary: bool = True) -> Any:
        tensor_sent = InferInput(name, list(value.shape), kind)
        tensor_sent.set_data_from_numpy(value, binary_data=binary)
        return InferRequest(model_name=model, infer_inputs=[tensor_sent], request_id="seven")

    assert await rest.is_server_live(base)
    assert await rest.is_server_ready(base)
    assert await rest.is_model_ready(base, "float32")
    assert not await rest.is_model_ready(base, "wrong")
    assert await rpc.is_server_live()
    assert await rpc.is_server_ready()
    assert await rpc.is_model_ready("float32")
    assert not await rpc.is_model_ready("wrong")
    for kind in NAMES:
        if kind == "bfloat16":
            continue  # KServe has no such type
        value = values(kind)
        for binary in (True, False):
            if binary or kind != "float16":
                result = await rest.infer(base, request(kind, value, TYPES[kind], binary=binary), model_name=kind)
                np.testing.assert_array_equal(result.outputs[0].as_numpy(), value * (2 if kind == "float32" else 1))
                result = await rpc.infer(request(kind, value, TYPES[kind], binary=binary))
                np.testing.assert_array_equal(result.outputs[0].as_numpy(), value * (2 if kind == "float32" else 1))
    texts = np.asarray(["a boat", "rain"], object)
    for binary in (True, False):
        result = await rest.infer(base, request("encoder", texts, "BYTES", "text", binary), model_name="encoder")
        np.testing.assert_allclose(result.outputs[0].as_numpy(), vectors, atol=1e-5)
        result = await rpc.infer(request("encoder", texts, "BYTES", "text", binary))
        np.testing.assert_allclose(result.outputs[0].as_numpy(), vectors, atol=1e-5)
    for call, problem in (
        (rest.infer(base, request("wrong", values("float32"), "FP32"), model_name="wrong"), "404"),
        (rest.infer(base, request("float32", values("float32"), "FP32", "z"), model_name="float32"), "400"),
        (rpc.infer(request("wrong", values("float32"), "FP32")), "NOT_FOUND"),
        (rpc.infer(request("float32", values("float32"), "FP32", "z")), "INVALID_ARGUMENT"),
    ):
        result = None
        try:
            await call
        except Exception as error:
            result = error
        assert problem in f"{result} {getattr(result, 'code', str)()}", result
    await rpc.close()
    await rest.close()


def client_side(clients: str, http: str, grpc: str, path: str) -> int:
    vectors, failed = np.load(path), 0
    # It logs what it raises.
    logging.disable()
    cases: dict[str, Callable[[], Any]] = {"kserve": lambda: asyncio.run(kserve_cases(http, grpc, vectors))}
    if clients == "triton":
        import tritonclient.grpc
        import tritonclient.http

        cases = {}
        for module, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            options = {"concurrency": 8} if module is tritonclient.http else {}
            found_cases = triton_cases(module, module.InferenceServerClient(address, **options), vectors)
            cases |= {f"{module.__name__} {name}": case for name, case in found_cases.items()}
    for name, case in cases.items():
        try:
            case()
            print(f"{name}: right")
        except Exception:
            failed += 1
            print(f"{name}: WRONG\n{traceback.format_exc()}")
    print(f"{len(cases)} checks, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(client_side(*sys.argv[2:]) if sys.argv[1:2] == ["--client"] else main())
