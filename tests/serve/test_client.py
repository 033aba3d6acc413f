"""The client of OpenAI-compatible servers: whole answers from good ones, one clear error from the others."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from serve.conftest import listening, serving
from serve.fakes import END, MODELS, STREAM, Hangup, chunk, event, fake, response, says

from argosy.client.client import AsgiTransport, ConnectionFailed, HttpReply, RequestRefused, ask, documents
from argosy.client.http import Http
from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.lm import LM
from argosy.serve.app import App
from argosy.serve.service import Service


def read(blocks: list[bytes]) -> list[Any]:
    """The documents of a stream that comes in these blocks."""

    async def go() -> list[Any]:
        async def some() -> AsyncIterator[bytes]:
            for block in blocks:
                yield block

        reply = HttpReply(200, {"content-type": "text/event-stream; charset=utf-8"}, some())  # pyright: ignore[reportArgumentType]
        return [document async for document in documents(reply)]

    return asyncio.run(go())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_the_same_however_they_are_cut(size: int, end: str):
    lines = [": a comment", 'data: {"a": "é🙂"}', "", 'data:{"b":', 'data: 2}', "id: 7", "", "", "event: x", 'data: {"c": 3}', ""]
    raw = end.join([*lines, "data: [DONE]", "", ""]).encode()
    assert read([raw[i : i + size] for i in range(0, len(raw), size)]) == [{"a": "é🙂"}, {"b": 2}, {"c": 3}]


def test_a_line_without_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.client.client.LINE", 1000)
    with pytest.raises(ConnectionFailed, match="longer than 1,000 bytes"):
        read([b"data: " + b"x" * 900, b"x" * 200])


def request_once(script: Any, *, seconds: float = 20, stream: bool = True) -> Any:
    """What one request to a scripted server gives."""

    async def go() -> Any:
        async with fake(script) as server, Http(server.url, seconds=seconds) as http:
            if not stream:
                return await ask(http, "GET", "/v1/models")
            async with http.send("POST", "/x", {"a": 1}) as reply:
                return [document async for document in documents(reply)]

    return asyncio.run(go())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "parts, error, problem",
    [
        ([], ConnectionFailed, "broke off in the middle of an answer"),
        ([b"SSH-2.0-OpenSSH\r\n"], ConnectionFailed, "speaks no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nno colon\r\n"], ConnectionFailed, "speaks no HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], ConnectionFailed, "broke off"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2**21], ConnectionFailed, "line of more than"),
        ([STREAM, event({"a": 1}), b"40\r\ndata: {"], ConnectionFailed, "broke off"),
        ([STREAM, event({"a": 1}), b"zz\r\n"], ConnectionFailed, "chunk without a size"),
        ([STREAM, event({"a": 1}), b"-5\r\n"], ConnectionFailed, "chunk without a size"),
        ([STREAM, event({"a": 1}), b"0\r\n\r\n"], ConnectionFailed, r"without `\[DONE\]`"),
        ([STREAM, chunk(b"data: {broken\n\n"), END], ConnectionFailed, "an event is no JSON: '{broken'"),
        ([STREAM, chunk(b"data: [1]\n\n"), END], ConnectionFailed, "an event is no JSON object"),
        ([STREAM, event({"error": {"message": "out of pages", "code": "x"}}), END], RequestRefused, "out of pages"),
        ([HEAD + b"content-length: 500\r\n\r\ndata: {}\n\n"], ConnectionFailed, "broke off"),
        ([HEAD + b"\r\ndata: {}\n\n"], ConnectionFailed, r"without `\[DONE\]`"),
        ([response(b"<html>oops", "500 Internal Server Error", "text/html")], RequestRefused, "status 500: '<html>oops'"),
        ([response(b"", "502 Bad Gateway")], RequestRefused, "status 502$"),
        ([response(b'{"error": "no such route"}', "404 Not Found")], RequestRefused, "no such route"),
        ([response(b'{"detail": "not here"}', "404 Not Found")], RequestRefused, "not here"),
        ([response(b'{"message": "vLLM says so"}', "400 Bad Request")], RequestRefused, "vLLM says so"),
        ([response(b'{"choices": []}')], ConnectionFailed, "no event stream, but application/json"),
    ],
)
def test_a_bad_answer_is_one_clear_error(parts: list[bytes], error: type[ArgosyError], problem: str):
    with pytest.raises(error, match=problem):
        request_once(says(*parts))


def test_a_document_that_is_no_json_is_an_error():
    with pytest.raises(ConnectionFailed, match="no JSON, but '<html>'"):
        request_once(says(response(b"<html>")), stream=False)
    assert request_once(says(MODELS), stream=False)["data"][0]["id"] == "fake"


def test_bodies_without_length_and_announcements_are_read():
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    assert request_once(says(early + b'HTTP/1.0 200 OK\r\n\r\n{"a": ', b"1}"), stream=False) == {"a": 1}


def test_an_error_has_its_status_code_and_wait():
    body = b'{"error": {"message": "later", "code": "queue_full"}}'
    with pytest.raises(RequestRefused) as error:
        request_once(says(response(body, "503 Service Unavailable", more="Retry-After: 2\r\n")), stream=False)
    assert (error.value.status, error.value.code, error.value.retry_after) == (503, "queue_full", 2.0)


def test_a_slow_server_is_left():
    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(STREAM + event({"a": 1}))
        await asyncio.Event().wait()

    with pytest.raises(ConnectionFailed, match=r"took longer than 0\.1 seconds"):
        request_once(script, seconds=0.1)


def test_connections_are_kept_and_replaced_when_the_server_has_closed_them():
    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(MODELS)
        if path == "/last":
            raise Hangup

    async def go() -> tuple[int, int]:
        async with fake(script) as server, Http(server.url) as http:
            for _ in range(5):
                await ask(http, "GET", "/v1/models")
            connections = server.connections
            await ask(http, "GET", "/last")
            await ask(http, "GET", "/v1/models")
            return connections, server.connections

    assert asyncio.run(go()) == (1, 2)


def test_leaving_early_hangs_up():
    hung_up = asyncio.Event()

    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(STREAM)
        try:
            while True:
                await send(event({"a": "x" * 10_000}))
                await asyncio.sleep(0)
        except OSError:
            hung_up.set()
            raise

    async def go() -> None:
        async with fake(script) as server, Http(server.url) as http:
            async with http.send("POST", "/x", {}) as reply, aclosing(documents(reply)) as stream:
                await anext(stream)
            async with asyncio.timeout(20):
                await hung_up.wait()
            assert not http._idle

    asyncio.run(go())


def test_a_server_that_does_not_listen_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConnectionFailed, match=f"cannot connect to http://127.0.0.1:{port}: connection refused") as error:
            asyncio.run(ask(Http(f"http://127.0.0.1:{port}/v1/"), "GET", "/v1/models"))
    assert "argosy serve" in (error.value.hint or "")


@pytest.mark.parametrize(
    "url, base",
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h/v1", "http://h:80"),
        ("https://h:1/api/v1/", "https://h:1/api"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses_are_read(url: str, base: str):
    assert Http(url).url == base


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h/?q=1", "http://[::1"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(BadInput, match="no address of a server"):
        Http(url)


def test_a_key_cannot_smuggle_a_header():
    with pytest.raises(BadInput, match="no header can carry"):
        Http("http://h", key="a\r\nX-Evil: 1")


def test_a_server_with_a_certificate_is_reached(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    with (
        serving(lm) as service,
        listening(service, tls_certificate=str(certificate), tls_key=str(key), api_key="k") as url,
    ):

        async def go() -> Any:
            async with Http(url, key="k") as http:
                return await ask(http, "GET", "/v1/models")

        with pytest.raises(ConnectionFailed, match="self-signed certificate"):
            asyncio.run(go())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert asyncio.run(go())["data"][0]["id"] == "tiny"


# ---------------------------------------------------------------- in this process


def test_an_application_is_asked_without_a_socket(service: Service):
    async def go() -> tuple[Any, list[Any]]:
        server = AsgiTransport(App(service).asgi)
        body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True, "stream": True}
        async with server.send("POST", "/v1/completions", body) as reply:
            events = [document async for document in documents(reply)]
        return await ask(server, "GET", "/v1/models"), events

    models, events = asyncio.run(go())
    assert models["data"][0]["meta"] == {"n_vocab": 258}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_an_application_is_left_early(service: Service):
    async def go() -> None:
        server = AsgiTransport(App(service).asgi)
        body = {"prompt": "Once", "max_tokens": 90, "ignore_eos": True, "stream": True}
        async with server.send("POST", "/v1/completions", body) as reply, aclosing(documents(reply)) as stream:
            await anext(stream)
        assert not service.front.opened

    asyncio.run(go())


def test_an_application_that_breaks_answers_or_fails():
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return None

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        raise RuntimeError("as Starlette does")

    with pytest.raises(ConnectionFailed, match="no answer to GET /x"):
        asyncio.run(ask(AsgiTransport(silent), "GET", "/x"))
    with pytest.raises(RequestRefused, match="status 500"):
        asyncio.run(ask(AsgiTransport(broken), "GET", "/x"))
