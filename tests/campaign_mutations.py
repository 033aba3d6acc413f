"""Mutated requests to a server of bundles, over REST and gRPC: none may be answered with a server's error, or wrongly.

    ./run python tests/campaign_mutations.py [n=100000] [seed=0] [first=0] [clients=16]

A request is a good one of which fields, bytes, headers or the address were changed. It is right to refuse it (4xx; the codes of gRPC
for the same), to answer it as what was then sent asks for, or to give it up (503, 504). After each hundred a good request must have
its answer over both. At the end: no traceback, memory as after the first fifth. A request is made again by its seed and number:
`first=NUMBER n=1`. Prints counts of statuses; exit code 1 where something was found.
"""

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from predict.predict_servers import grpc_address, serving, write_scaled

from argosy.predict.grpc.messages import inference_proto

FACTORS = {"1": 2.0, "2": 3.0}
X = np.asarray([[1, 2, 3], [4, 5, 6]], np.float32)
PATIENCE_S = 60
GROWTH_BYTES = 32 << 20
# What a client may be told; the others are faults of the server.
STATUSES = {200, 307, 400, 401, 403, 404, 405, 408, 413, 414, 415, 422, 431, 503, 504}
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *("", "x", "y", "1", "FP32", "FP16", "INT64", "BYTES", "BOOL", "\ud800", "\x00", "é" * 300, "../../etc"),
    *([], [[]], {}, [None], [0] * 300, {"a": {}}, [[[[1]]]]),
]
INFER = "/inference.GRPCInferenceService/ModelInfer"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_models(folder: Path) -> None:
    """Rows times a number in two versions, two inputs of other types, and an ensemble of both."""
    import jax.numpy as jnp

    import argosy

    for version, factor in FACTORS.items():
        write_scaled(folder / "scaled" / version, factor)
    (folder / "scaled" / "config.yml").write_text("versions: all\nlabels: {stable: 1}\n")
    example = jnp.zeros((1, 4), "int8"), jnp.zeros((1,), bool)
    argosy.export(lambda a, b: {"c": jnp.where(b[:, None], a, -a)}, example, folder / "pair" / "1", platforms=["cpu"], batch=[1, 8])
    (folder / "twice").mkdir()
    steps = '[{"model": "scaled", "output_map": {"y": "h"}}, {"model": "scaled", "input_map": {"x": "h"}}]'
    (folder / "twice" / "config.yml").write_text(f"ensemble: {{steps: {steps}}}\n")


# ---------------------------------------------------------------- mutations


def changed_value(draw: random.Random, value: Any) -> Any:
    """A JSON value with one to three places changed, removed or doubled."""
    value = deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[Any, Any]] = []

        def walk(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            for key in keys:
                places.append((node, key))
                walk(node[key])

        walk(value)
        if not places:
            return deepcopy(draw.choice(STRANGE))
        node, key = draw.choice(places)
        way = draw.random()
        if way < 0.6:
            node[key] = deepcopy(draw.choice(STRANGE))
        elif way < 0.75:
            del node[key]
        elif way < 0.85 and isinstance(node, list):
            node.insert(key, deepcopy(node[key]))
        elif isinstance(node, dict):
            node[str(draw.choice(["id", "parameters", "outputs", "name", "x", ""]))] = deepcopy(node[key])
        else:
            node[key] = [node[key]]
    return value


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes with bits flipped, cut, doubled, or something put in."""
    raw = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = draw.randrange(len(raw) + 1)
        way = draw.randrange(5)
        if way == 0 and at < len(raw):
            raw[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            del raw[at:]
        elif way == 2:
            del raw[at : at + draw.randint(1, 9)]
        elif way == 3:
            raw[at:at] = raw[at : at + draw.randint(1, 40)]
        else:
            noise = bytes(draw.choices(range(256), k=8))
            raw[at:at] = draw.choice((b"\x00", b"\xff", b"[", b"{", b'"', b"-", b"9" * 20, b"\r\n", noise))
    return bytes(raw)


@dataclass
class Sent:
    """A request. content: the JSON in the body, where nothing else was changed. raw: the bytes that are sent in place of all this."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    content: Any = None
    raw: bytes | None = None


def good_rest(draw: random.Random) -> tuple[str, str, Any, bytes]:
    """Method, path, JSON and binary part of a good request."""
    version = draw.choice(("", "/versions/1", "/versions/2"))
    tensor = {"name": "x", "shape": [2, 3], "datatype": "FP32"}
    kind = draw.random()
    if kind < 0.35:
        more = draw.choice(({}, {"id": "a"}, {"parameters": {"timeout": 10**6}}, {"outputs": [{"name": "y"}]}))
        model = draw.choice((f"scaled{version}", f"scaled{version}", "twice"))
        return "POST", f"/v2/models/{model}/infer", {"inputs": [tensor | {"data": X.tolist()}]} | more, b""
    if kind < 0.6:
        content = {"inputs": [tensor | {"parameters": {"binary_data_size": 24}}]}
        content |= {"parameters": {"binary_data_output": draw.random() < 0.5}}
        return "POST", f"/v2/models/scaled{version}/infer", content, X.tobytes()
    if kind < 0.7:
        a = {"name": "a", "shape": [1, 4], "datatype": "INT8", "data": [1, 2, 3, 4]}
        return "POST", "/v2/models/pair/infer", {"inputs": [a, {"name": "b", "shape": [1], "datatype": "BOOL", "data": [True]}]}, b""
    if kind < 0.85:
        rows = X.tolist()
        content = draw.choice(({"instances": rows}, {"inputs": {"x": rows}}, {"instances": [{"x": row} for row in rows]}))
        return "POST", f"/v1/models/scaled{draw.choice(('', '/labels/stable', '/versions/2'))}:predict", content, b""
    if kind < 0.9:
        return "POST", "/v1/embeddings", {"model": "scaled", "input": ["a"]}, b""
    if kind < 0.93:
        return "POST", "/v2/repository/index", {"ready": True}, b""
    if kind < 0.95:
        return "POST", "/v2/repository/models/scaled/load", {"parameters": {}}, b""
    paths = ("/v2", "/v2/models/scaled", "/v2/models/scaled/config", "/v2/models/stats", "/v1/models/scaled/metadata", "/metrics")
    return "GET", draw.choice(paths), None, b""


def mutated_rest(draw: random.Random) -> Sent:
    method, path, value, binary = good_rest(draw)
    way, whole = draw.random(), None
    if value is not None and way < 0.5:
        value = whole = changed_value(draw, value)
    head = b"" if value is None else json.dumps(value).encode()
    headers = [("Content-Type", "application/json")]
    if binary:
        headers.append(("Inference-Header-Content-Length", str(len(head))))
    body = head + binary
    if 0.5 <= way < 0.75:
        body, whole = changed_bytes(draw, body), None
    elif 0.75 <= way < 0.85:
        names = ("Inference-Header-Content-Length", "Content-Encoding", "Content-Type", "Accept", "Origin", "Host", "Expect", "X-A")
        values = ("", "-1", "0", "7", "99999999999999999999", "gzip", "deflate", "br", "text/plain", "a" * 5000, "evil.example", "１")
        headers.append((draw.choice(names), draw.choice(values)))
        whole = None
    elif way >= 0.85:
        at = draw.randrange(1, len(path) + 1)
        junk = draw.choice(("/", "..", "%00", "%2e%2e", "%ff", "?a=b", "#", ":", "é", "9" * 30, "versions/", "x" * 9000))
        path = draw.choice((path[:at], path[:at] + junk + path[at:], path + junk))
        method = draw.choice((method, method, "PUT", "DELETE", "OPTIONS", "HEAD", "GET", "POST"))
        whole = None
    raw = None
    if draw.random() < 0.05:
        lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1", "replace")
        raw, whole = changed_bytes(draw, lines + body), None
    return Sent(method, path, headers, body, whole, raw)


def mutated_grpc(draw: random.Random) -> tuple[str, bytes, float]:
    """Method, bytes and deadline of a call."""
    proto = inference_proto()
    name = draw.choice(("ModelInfer",) * 8 + tuple(proto.methods))
    message = proto.methods[name].request()
    if name in ("ModelInfer", "ModelStreamInfer"):
        message.model_name = draw.choice(("scaled", "scaled", "twice", "pair"))
        tensor = message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
        if draw.random() < 0.5:
            message.raw_input_contents.append(X.tobytes())
        else:
            tensor.contents.fp32_contents.extend(X.ravel().tolist())
        for _ in range(draw.randint(0, 3)):
            change_message(draw, message)
    else:
        for descriptor in message.DESCRIPTOR.fields:
            if descriptor.name in ("name", "version", "model_name") and name != "RepositoryModelUnload":
                setattr(message, descriptor.name, draw.choice(("scaled", "1", "", "é" * 50, "x")))
    data = message.SerializeToString()
    if draw.random() < 0.5:
        data = changed_bytes(draw, data)
    if draw.random() < 0.03:
        name = draw.choice(("TraceSetting", "", "modelinfer", "ModelInfer/x"))
    return name, data, draw.choice((PATIENCE_S,) * 30 + (0.001, 0.01))


def change_message(draw: random.Random, message: Any) -> None:
    tensor = message.inputs[0] if message.inputs else message.inputs.add()
    texts = ("", "x", "y", "z", "FP16", "BF16", "INT8", "BYTES", "UINT64", "FP4", "9" * 40, "é" * 300)
    match draw.randrange(10):
        case 0:
            tensor.name = draw.choice(texts)
        case 1:
            tensor.datatype = draw.choice(texts)
        case 2:
            tensor.shape[:] = [draw.choice((-1, 0, 1, 2, 3, 6, 2**31, 2**62, -(2**63))) for _ in range(draw.randint(0, 20))]
        case 3:
            message.inputs.add().CopyFrom(tensor)
        case 4:
            message.raw_input_contents.append(draw.choice((b"", b"\x00" * 24, b"\xff" * 24, struct.pack("<I", 2**32 - 1), bytes(25))))
        case 5:
            tensor.contents.int_contents.append(draw.choice((-(2**31), 0, 2**31 - 1)))
        case 6:
            tensor.contents.bytes_contents.append(draw.choice((b"", b"\xff", b"a")))
        case 7:
            key = draw.choice(("timeout", "signature", "priority", "binary_data_output", "shared_memory_region"))
            parameter = message.parameters[key]
            setattr(parameter, draw.choice(("bool_param", "int64_param", "double_param", "uint64_param")), 1)
            if draw.random() < 0.3:
                parameter.string_param = draw.choice(texts)
        case 8:
            message.outputs.add(name=draw.choice(texts)).parameters["classification"].int64_param = draw.choice((0, 1, -5))
        case _:
            message.model_version = draw.choice(("1", "2", "3", "-1", "９", "9" * 30, " 1"))


# ---------------------------------------------------------------- a client


class Http:
    """Requests on a connection that is kept, written by hand so that they may be wrong."""

    def __init__(self, address: str):
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Sent) -> tuple[int, bytes]:
        """Status and body; 0: the server closed the connection without an answer."""
        reused = self.writer is not None
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        names = {name for name, _ in request.headers}
        headers = [*([] if "Host" in names else [("Host", "localhost")]), *request.headers, ("Content-Length", str(len(request.body)))]
        head = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        try:
            self.writer.write((head.encode("utf-8") + request.body) if request.raw is None else request.raw)
            if request.raw is not None:
                self.writer.write_eof()  # a request that is cut ends here
            await self.writer.drain()
            status, body, keep = await asyncio.wait_for(self._answer(request.method), PATIENCE_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if reused and request.raw is None:
                return await self.ask(request)  # the server closed it after the last answer
            return 0, b""
        if not keep or request.raw is not None:
            self.close()
        return status, body

    async def _answer(self, method: str) -> tuple[int, bytes, bool]:
        assert self.reader is not None
        while True:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
            if status != 100:
                break
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        keep = headers.get("connection", "").lower() != "close"
        if "transfer-encoding" in headers:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
            return status, body, keep
        if "content-length" not in headers and not keep:
            return status, await self.reader.read(), keep
        size = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
        return status, await self.reader.readexactly(size), keep

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


@dataclass
class Outcome:
    """statuses: how many of each. findings: number and what was wrong. memory: bytes, as requests went on."""

    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def wrong_answer(request: Sent, status: int, body: bytes) -> str | None:
    """What is wrong with an answer."""
    if request.raw is not None and status == 0:
        return None  # not HTTP any more
    if status not in STATUSES:
        return f"status {status}"
    if status >= 400 and request.method != "HEAD" and request.path.startswith("/v2/models/"):
        try:
            if list(json.loads(body)) != ["error"]:
                return "an error in another form"
        except ValueError:
            # Before any route: uvicorn's own answer to what is no HTTP.
            return None if body.startswith((b"Invalid HTTP", b"Missing")) or request.raw is not None else "an error that is no JSON"
    if status == 200 and request.path.endswith("/infer") and request.content is not None and "scaled" in request.path:
        return wrong_rows(request, body)
    return None


def wrong_rows(request: Sent, body: bytes) -> str | None:
    """Compares the rows of an answer with those that were sent, where both are JSON."""
    tensor = request.content["inputs"][0]
    if "data" not in tensor or not body.endswith(b"}"):
        return None
    answer = json.loads(body)["outputs"][0]
    try:
        x = np.asarray(tensor["data"], np.float32).ravel()
    except ValueError:
        return "data that are no array were taken"
    factor = FACTORS["1" if "/versions/1/" in request.path else "2"]
    if not np.allclose(answer["data"], factor * x) or answer["shape"] != tensor["shape"]:
        return f"a wrong answer: {answer}"
    return None


async def campaign(url: str, grpc_target: str, pid: int, n: int, seed: int, first: int = 0, clients: int = 16) -> Outcome:
    """Sends requests `first` to `first + n`."""
    outcome = Outcome()
    numbers = iter(range(first, first + n))
    done = 0
    start = time.monotonic()
    async with grpc.aio.insecure_channel(grpc_target) as channel:

        async def good(http: Http) -> None:
            content = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": X.tolist()}]}
            status, body = await http.ask(Sent("POST", "/v2/models/scaled/versions/1/infer", [], json.dumps(content).encode()))
            messages = inference_proto().messages
            message = messages["ModelInferRequest"](model_name="scaled", model_version="1", raw_input_contents=[X.tobytes()])
            message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
            raw = await channel.unary_unary(INFER)(message.SerializeToString(), timeout=PATIENCE_S)
            response = messages["ModelInferResponse"].FromString(raw)
            expected = (2 * X).astype("<f4").tobytes()
            if status != 200 or json.loads(body)["outputs"][0]["data"] != (2 * X).ravel().tolist():
                outcome.findings.append(f"a good request got {status} {body[:200]!r}")
            if response.raw_output_contents[0] != expected:
                outcome.findings.append("a good call got another answer")

        async def over_grpc(number: int, draw: random.Random) -> None:
            name, data, seconds = mutated_grpc(draw)
            streams = name == "ModelStreamInfer"
            path = f"/inference.GRPCInferenceService/{name}"
            try:
                if streams:
                    async for _ in channel.stream_stream(path)(iter([data]), timeout=seconds):
                        pass
                else:
                    await channel.unary_unary(path)(data, timeout=seconds)
                code, details = "OK", ""
            except grpc.aio.AioRpcError as error:
                code, details = error.code().name, error.details() or ""
                if details == "Internal error from Core" and seconds < 1:
                    code = "DEADLINE_EXCEEDED"  # grpc.aio's own words for a stream whose deadline passed while it began
            except asyncio.CancelledError:
                if seconds > 1:
                    raise
                code, details = "CANCELLED", ""  # grpc.aio's way to end a stream whose deadline passed before it began
            outcome.statuses[f"gRPC {code}"] += 1
            if code not in CODES or (code == "DEADLINE_EXCEEDED" and seconds == PATIENCE_S and "more than" not in details):
                outcome.findings.append(f"{number}: gRPC {name} {code} {details[:200]}")

        async def no_http2(draw: random.Random) -> None:
            """Bytes that are no HTTP/2, or the beginning of it and then no frames."""
            host, _, port = grpc_target.rpartition(":")
            start = draw.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"))
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(start + bytes(draw.choices(range(256), k=draw.randint(0, 200))))
                writer.write_eof()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), 5)
                writer.close()
            outcome.statuses["gRPC port, no HTTP/2"] += 1

        async def client() -> None:
            nonlocal done
            http = Http(url.partition("://")[2])
            for number in numbers:
                draw = random.Random(f"{seed}:{number}")
                kind = draw.random()
                if kind < 0.01:
                    await no_http2(draw)
                elif kind < 0.4:
                    await over_grpc(number, draw)
                else:
                    request = mutated_rest(draw)
                    status, body = await http.ask(request)
                    outcome.statuses[str(status)] += 1
                    if problem := wrong_answer(request, status, body):
                        outcome.findings.append(f"{number}: {request.method} {request.path[:100]}: {problem} {body[:200]!r}")
                done += 1
                if done % 100 == 0:
                    await good(http)
                if done % max(1, n // 20) == 0:
                    outcome.memory.append(resident_bytes(pid))
                if done % 10_000 == 0:
                    pace = done / (time.monotonic() - start)
                    print(f"{done} requests, {pace:.0f} a second, {resident_bytes(pid) >> 20} MiB", flush=True)
            http.close()

        await asyncio.gather(*(client() for _ in range(min(clients, n))))
    return outcome


def main() -> int:
    words = {name: int(value) for name, value in (word.split("=", 1) for word in sys.argv[1:])}
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        with serving(Path(name), "grpc=0", "limits.upload_seconds=5") as (url, log):
            outcome = asyncio.run(
                campaign(url, grpc_address(log), log.pid, **({"n": 100_000, "seed": 0} | words))
            )
    outcome.findings += ["\n".join(log[i : i + 25]) for i, line in enumerate(log) if line.startswith("Traceback")]
    early, late = outcome.memory[len(outcome.memory) // 5], outcome.memory[-1]
    if late - early > GROWTH_BYTES:
        outcome.findings.append(f"memory grew from {early >> 20} to {late >> 20} MiB")
    for status, count in sorted(outcome.statuses.items()):
        print(f"{status}: {count}")
    print(f"memory {early >> 20} MiB after a fifth, {late >> 20} MiB at the end")
    print(f"{sum(outcome.statuses.values())} requests, {len(outcome.findings)} findings")
    print("\n".join(outcome.findings[:50]))
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
