"""A small client of OpenAI-compatible servers: JSON in, JSON or server-sent events out, over HTTP (`client.http`) or straight into an
ASGI application of this process.

    async with Http("http://127.0.0.1:8000") as server:
        async with server.send("POST", "/v1/completions", body) as reply:
            async for document in documents(reply):
                ...

asyncio and the standard library only, no jax. Knows nothing of what the documents mean.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from argosy.core.errors import ArgosyError

# Bytes of a status line, a header or a line of an event stream.
LINE = 2**20


class ConnectionFailed(ArgosyError):
    """No answer, or half of one: the server cannot be reached, hung up, or sent what is no HTTP."""


class RequestRefused(ArgosyError):
    """The server answered with an error.

    status: of HTTP; 200 if the error came in the middle of a stream.
    code: OpenAI's word for it, if it has one.
    retry_after: seconds.
    """

    def __init__(self, what: str, *, status: int, code: str | None = None, retry_after: float | None = None):
        super().__init__(what)
        self.status, self.code, self.retry_after = status, code, retry_after


class HttpReply:
    """A response whose headers have arrived. Iterating gives the body in blocks, as they come.

    headers: with lower-case names.
    """

    def __init__(self, status: int, headers: Mapping[str, str], blocks: AsyncGenerator[bytes, None]):
        self.status, self.headers, self._blocks = status, headers, blocks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._blocks

    async def close(self) -> None:
        """Stops reading."""
        await self._blocks.aclose()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([block async for block in self._blocks])

    async def json(self) -> Any:
        """The body's JSON document.

        Raises:
            RequestRefused: the status is an error. ConnectionFailed: the body is no JSON.
        """
        body = await self.read()
        if self.status >= 400:
            raise error_of_body(self.status, body, self.headers)
        try:
            return json.loads(body)
        except ValueError:
            raise ConnectionFailed(f"the server sent no JSON, but {quote_bytes(body)}") from None


class ClientTransport(Protocol):
    """Something that takes requests: a server, or an application of this process."""

    def send(self, method: str, path: str, body: Any = None) -> contextlib.AbstractAsyncContextManager[HttpReply]:
        """Sends a request, whose body is a JSON document or bytes of one. Leaving the context early hangs up, which makes a server
        stop generating.

        Raises:
            ConnectionFailed: there is no answer.
        """
        ...


async def ask(server: ClientTransport, method: str, path: str, body: Any = None) -> Any:
    """The JSON document that answers a request.

    Raises:
        ConnectionFailed: there is no answer. RequestRefused: the server answers with an error.
    """
    async with server.send(method, path, body) as reply:
        return await reply.json()


async def documents(reply: HttpReply) -> AsyncGenerator[dict[str, Any], None]:
    """The documents of a stream of server-sent events, up to its `[DONE]`.

    Raises:
        RequestRefused: the status, or a document of the stream, is an error.
        ConnectionFailed: the stream is cut short, or holds something that is no JSON object.
    """
    if reply.status >= 400:
        raise error_of_body(reply.status, await reply.read(), reply.headers)
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise ConnectionFailed(f"the server sent no event stream, but {kind or 'a body of no type'}: {quote_bytes(await reply.read())}")
    async with aclosing(_events(reply)) as events:
        async for data in events:
            if data == b"[DONE]":
                # The end of the body follows. Reading it leaves the connection usable.
                async for _ in reply:
                    pass
                return
            try:
                document = json.loads(data)
            except ValueError:
                raise ConnectionFailed(f"an event is no JSON: {quote_bytes(data)}") from None
            if not isinstance(document, dict):
                raise ConnectionFailed(f"an event is no JSON object: {quote_bytes(data)}")
            if document.get("error"):
                raise error_of_body(reply.status, data, {})
            yield document
    raise ConnectionFailed("the stream ended without `[DONE]`")


async def _events(reply: HttpReply) -> AsyncGenerator[bytes, None]:
    """The data of each event, however the body is cut into blocks. Comments and fields other than `data` are skipped."""
    rest, data = b"", []
    async for block in reply:
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LINE:
            raise ConnectionFailed(f"a line of the stream is longer than {LINE:,} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def error_of_body(status: int, body: bytes, headers: Mapping[str, str]) -> RequestRefused:
    """The error in a body, in the shape of OpenAI, of vLLM, or whatever text it is."""
    message, code = None, None
    with contextlib.suppress(ValueError):
        document = json.loads(body)
        error = document.get("error", document) if isinstance(document, dict) else document
        if isinstance(error, dict):
            message, code = error.get("message") or error.get("detail"), error.get("code")
        elif isinstance(error, str):
            message = error
    problem = str(message) if message else f"status {status}: {quote_bytes(body)}" if body else f"status {status}"
    try:
        wait = float(headers.get("retry-after", ""))
    except ValueError:
        wait = None
    return RequestRefused(problem, status=status, code=None if code is None else str(code), retry_after=wait)


def quote_bytes(body: bytes) -> str:
    """The beginning of some bytes, for a message."""
    text = body[:120].decode("utf-8", "replace").strip()
    return f"{text!r}{' ...' if len(body) > 120 else ''}"


def is_url(text: str) -> bool:
    """Whether a word of the command line is a server's address, and no model."""
    return text.startswith(("http://", "https://"))


# ---------------------------------------------------------------- in this process


class AsgiTransport:
    """An ASGI application of this process, asked without a socket. Nothing limits how many requests it is given at a time."""

    def __init__(self, app: Callable[..., Any]):
        self.app = app

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpReply]:
        """As `Transport.send`."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"host", b"localhost"), (b"content-length", str(len(content)).encode())]
        headers += [(b"content-type", b"application/json")] if content else []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        disconnect, was_read = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal was_read
            if not was_read:
                was_read = True
                return {"type": "http.request", "body": content, "more_body": False}
            await disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self.app(scope, receive, send)
            finally:
                messages.put_nowait(None)

        async def blocks() -> AsyncGenerator[bytes, None]:
            while (message := await messages.get()) is not None:
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return

        work = asyncio.create_task(run())
        try:
            start = await messages.get()
            if start is None:
                await work
                raise ConnectionFailed(f"no answer to {method} {path}")
            reply_headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
            yield HttpReply(start["status"], reply_headers, blocks())
        finally:
            # As a client that hangs up: the application ends the request and frees what it holds.
            disconnect.set()
            await asyncio.wait({work})
            # Starlette raises again what it has answered with 500.
            if not work.cancelled():
                work.exception()
