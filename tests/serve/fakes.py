"""Servers that misbehave on purpose: each request gets the bytes of a script."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from queue import Queue
from typing import Any

# What a server does with a request: it is given the request's path and body, and a function that sends bytes.
Script = Callable[[str, Any, Callable[[bytes], Awaitable[None]]], Awaitable[None]]


class Hangup(Exception):
    """Ends the connection at once."""


class Fake:
    """connections: how many were opened. paths: of all requests. open, most: requests under way, and the most of them."""

    def __init__(self, script: Script):
        self.script = script
        self.connections, self.paths = 0, []
        self.writers: list[asyncio.StreamWriter] = []
        self.open, self.most = 0, 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        with contextlib.suppress(OSError, EOFError, Hangup):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
                body = await reader.readexactly(int(length.split(":")[1]))
                path = head.split()[1]
                self.paths.append(path)
                self.open += 1
                self.most = max(self.most, self.open)
                try:
                    await self.script(path, json.loads(body) if body else None, send)
                finally:
                    self.open -= 1
        writer.transport.abort()


@asynccontextmanager
async def fake(script: Script) -> AsyncIterator[Fake]:
    server = Fake(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for writer in server.writers:
            writer.transport.abort()
        # Handlers notice, and transports are closed, in the event loop's next turns.
        for _ in range(3):
            await asyncio.sleep(0)


def says(*parts: bytes) -> Script:
    """Each request gets these bytes, and its connection ends."""

    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        for part in parts:
            await send(part)
        raise Hangup

    return script


def response(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(document: Any) -> bytes:
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def tokens(count: int, prompt: int, spoken: Sequence[str] = ()) -> list[bytes]:
    """A whole answer of /v1/completions: its head, a chunk a token, and the rest."""
    texts = list(spoken) or ["a"] * count
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    parts = [event({"choices": [{"text": text, "finish_reason": None}]}) for text in texts]
    return [STREAM, *parts, event({"choices": [], "usage": usage}) + END]


@contextmanager
def endless() -> Iterator[str]:
    """A server in a thread whose answers never end; its address."""
    ended, urls = threading.Event(), Queue()

    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(MODELS if path == "/v1/models" else STREAM)
        while path != "/v1/models":
            await send(event({"choices": [{"delta": {"content": "word "}}]}))
            await asyncio.sleep(0.02)

    async def go() -> None:
        async with fake(script) as server:
            urls.put(server.url)
            while not ended.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(go()))
    thread.start()
    try:
        yield urls.get()
    finally:
        ended.set()
        thread.join()


MODELS = response(json.dumps({"data": [{"id": "fake", "meta": {"n_vocab": 100}}]}).encode())
