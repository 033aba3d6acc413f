"""A small client of OpenAI-compatible servers. It sends JSON and receives JSON or server-sent events, over HTTP (`client.http`) or by
calling an ASGI application in this process.

    async with Http("http://127.0.0.1:8000") as server:
        async with server.send("POST", "/v1/completions", body) as reply:
            async for document in documents(reply):
                ...

It uses asyncio and the standard library only, no jax, and does not interpret the JSON objects.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from argosy.core.errors import ArgosyError

# The most bytes of a status line, a header, or a line of an event stream.
LINE = 2**20


class ConnectionFailed(ArgosyError):
    """There is no whole response: the server cannot be reached, closed the connection, or sent invalid HTTP, JSON or events."""


class RequestRefused(ArgosyError):
    """The server responded with an error.

    status: the HTTP status; 200 if the error came in the middle of a stream.
    code: the error code in OpenAI's format, if there is one.
    retry_after: seconds after which the server asks to try again; None: it does not say.
    """

    def __init__(self, what: str, *, status: int, code: str | None = None, retry_after: float | None = None):
        super().__init__(what)
        self.status, self.code, self.retry_after = status, code, retry_after


class HttpReply:
    """A response whose headers have arrived. Iterating yields the body in blocks as they arrive.

    status: the HTTP status.
    headers: the headers, with lower-case names.
    """

    def __init__(self, status: int, headers: Mapping[str, str], blocks: AsyncGenerator[bytes, None]):
        self.status, self.headers, self._blocks = status, headers, blocks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._blocks

    async def close(self) -> None:
        """Stops reading the body."""
        await self._blocks.aclose()

    async def read(self) -> bytes:
        """Reads the rest of the body, and returns it."""
        return b"".join([block async for block in self._blocks])

    async def json(self) -> Any:
        """Reads the body, and returns its JSON value.

        Raises:
            RequestRefused: the status is an error.
            ConnectionFailed: the body is no JSON.
        """
        body = await self.read()
        if self.status >= 400:
            raise error_of_body(self.status, body, self.headers)
        try:
            return json.loads(body)
        except ValueError:
            raise ConnectionFailed(f"the server sent no JSON, but {quote_bytes(body)}") from None


class ClientTransport(Protocol):
    """The interface of a connection to a server (`client.http.Http`) or to an application in this process (`AsgiTransport`)."""

    def send(self, method: str, path: str, body: Any = None) -> contextlib.AbstractAsyncContextManager[HttpReply]:
        """Sends a request. Leaving the context early closes the connection, which makes a server stop generating.

        Args:
            body: a value to send as JSON, or the bytes of JSON; None: no body.

        Raises:
            ConnectionFailed: there is no response.
        """
        ...


async def ask(server: ClientTransport, method: str, path: str, body: Any = None) -> Any:
    """Sends a request, and returns the JSON value of the response. Arguments are those of `ClientTransport.send`.

    Raises:
        ConnectionFailed: there is no response, or it is no JSON.
        RequestRefused: the server responds with an error.
    """
    async with server.send(method, path, body) as reply:
        return await reply.json()


async def documents(reply: HttpReply) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the JSON objects of a stream of server-sent events, up to `[DONE]`.

    Raises:
        RequestRefused: the status, or an object of the stream, is an error.
        ConnectionFailed: the stream is cut short, or has an event that is no JSON object.
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
    """Yields the data of each event, across the boundaries of blocks. Comments and fields other than `data` are skipped."""
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
    """Makes the error of a response. Its body may have OpenAI's or vLLM's format, or be any text.

    Args:
        status: the HTTP status.
        headers: the headers, for `retry-after`.
    """
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
    """Quotes the beginning of bytes, for an error message."""
    text = body[:120].decode("utf-8", "replace").strip()
    return f"{text!r}{' ...' if len(body) > 120 else ''}"


def is_url(text: str) -> bool:
    """Whether an argument of the command line is the URL of a server, rather than a model."""
    return text.startswith(("http://", "https://"))


# ---------------------------------------------------------------- in this process


class AsgiTransport:
    """Sends requests to an ASGI application in this process, without a socket. The number of concurrent requests is not limited."""

    def __init__(self, app: Callable[..., Any]):
        self.app = app

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpReply]:
        """As `ClientTransport.send`."""
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
            # As a client that disconnects: the application ends the request and frees its resources.
            disconnect.set()
            await asyncio.wait({work})
            # Starlette raises an error again after it has responded with 500.
            if not work.cancelled():
                work.exception()
