"""A small client of OpenAI-compatible servers: JSON in, JSON or server-sent events out, over HTTP/1.1 or straight into an ASGI
application of this process.

    async with Http("http://127.0.0.1:8000") as server:
        async with server.send("POST", "/v1/completions", body) as reply:
            async for document in documents(reply):
                ...

asyncio and the standard library only, no jax. It knows nothing of what the documents mean, follows no redirect and uses no proxy:
a benchmark must measure the server that was named.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

from argosy.core.errors import ArgosyError, BadInput

# Bytes of a status line, a header or a line of an event stream.
LINE = 2**20
# Bytes read at a time from a body that is not chunked.
BLOCK = 2**16
CONNECT_S = 10.0


class Failed(ArgosyError):
    """No answer, or half of one: the server cannot be reached, hung up, or sent what is no HTTP."""


class Refused(ArgosyError):
    """The server answered with an error.

    status: of HTTP; 200 if the error came in the middle of a stream. code: OpenAI's word for it, if it has one. retry_after: seconds.
    """

    def __init__(self, what: str, *, status: int, code: str | None = None, retry_after: float | None = None):
        super().__init__(what)
        self.status, self.code, self.retry_after = status, code, retry_after


class Reply:
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
            Refused: the status is an error. Failed: the body is no JSON.
        """
        body = await self.read()
        if self.status >= 400:
            raise refusal(self.status, body, self.headers)
        try:
            return json.loads(body)
        except ValueError:
            raise Failed(f"the server sent no JSON, but {shown(body)}") from None


class Transport(Protocol):
    """Something that takes requests: a server, or an application of this process."""

    def send(self, method: str, path: str, body: Any = None) -> contextlib.AbstractAsyncContextManager[Reply]:
        """Sends a request, whose body is a JSON document or bytes of one. Leaving the context early hangs up, which makes a server
        stop generating.

        Raises:
            Failed: there is no answer.
        """
        ...


async def ask(server: Transport, method: str, path: str, body: Any = None) -> Any:
    """The JSON document that answers a request.

    Raises:
        Failed: there is no answer. Refused: the server answers with an error.
    """
    async with server.send(method, path, body) as reply:
        return await reply.json()


async def documents(reply: Reply) -> AsyncGenerator[dict[str, Any], None]:
    """The documents of a stream of server-sent events, up to its `[DONE]`.

    Raises:
        Refused: the status, or a document of the stream, is an error. Failed: the stream is cut short or holds what is no JSON object.
    """
    if reply.status >= 400:
        raise refusal(reply.status, await reply.read(), reply.headers)
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise Failed(f"the server sent no event stream, but {kind or 'a body of no type'}: {shown(await reply.read())}")
    async with aclosing(_events(reply)) as events:
        async for data in events:
            if data == b"[DONE]":
                # What follows is the end of the body. Reading it leaves the connection usable.
                async for _ in reply:
                    pass
                return
            try:
                document = json.loads(data)
            except ValueError:
                raise Failed(f"an event is no JSON: {shown(data)}") from None
            if not isinstance(document, dict):
                raise Failed(f"an event is no JSON object: {shown(data)}")
            if document.get("error"):
                raise refusal(reply.status, data, {})
            yield document
    raise Failed("the stream ended without `[DONE]`")


async def _events(reply: Reply) -> AsyncGenerator[bytes, None]:
    """The data of each event, however the body is cut into blocks. Comments and fields other than `data` are skipped."""
    rest, data = b"", []
    async for block in reply:
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LINE:
            raise Failed(f"a line of the stream is longer than {LINE:,} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> Refused:
    """The error in a body, in the shape of OpenAI, of vLLM, or whatever text it is."""
    message, code = None, None
    with contextlib.suppress(ValueError):
        document = json.loads(body)
        error = document.get("error", document) if isinstance(document, dict) else document
        if isinstance(error, dict):
            message, code = error.get("message") or error.get("detail"), error.get("code")
        elif isinstance(error, str):
            message = error
    what = str(message) if message else f"status {status}: {shown(body)}" if body else f"status {status}"
    try:
        wait = float(headers.get("retry-after", ""))
    except ValueError:
        wait = None
    return Refused(what, status=status, code=None if code is None else str(code), retry_after=wait)


def shown(body: bytes) -> str:
    """The beginning of some bytes, for a message."""
    text = body[:120].decode("utf-8", "replace").strip()
    return f"{text!r}{' ...' if len(body) > 120 else ''}"


# ---------------------------------------------------------------- over HTTP


def is_url(text: str) -> bool:
    """Whether a word of the command line is a server's address, and no model."""
    return text.startswith(("http://", "https://"))


class Http:
    """A server. Connections are kept and used again, one request at a time each.

    Args:
        url: its address, with or without the `/v1` at its end.
        key: sent as `Authorization: Bearer KEY`.
        seconds: the longest that one request may take.

    Raises:
        BadInput: the address is no URL of HTTP.
    """

    def __init__(self, url: str, *, key: str | None = None, seconds: float = 600.0):
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BadInput(f"`{url}` is no address of a server", hint="such as http://127.0.0.1:8000")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        named = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{named}:{self.port}{self.prefix}"
        self.seconds = seconds
        self._headers = {"host": f"{named}:{self.port}", "accept": "application/json, text/event-stream"}
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise BadInput("the API key has characters that no header can carry")
            self._headers["authorization"] = f"Bearer {key}"
        self._context = ssl.create_default_context() if self.tls else None
        self._idle: list[_Wire] = []

    async def __aenter__(self) -> "Http":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections that are kept."""
        while self._idle:
            self._idle.pop().close()
        # The transports are closed by the event loop's next turn.
        await asyncio.sleep(0)

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[Reply]:
        """As `Transport.send`. After `seconds` the request fails."""
        wire = reply = None
        try:
            async with asyncio.timeout(self.seconds):
                wire, reply = await self._begun(self._request(method, path, body))
                yield reply
        except TimeoutError:
            raise Failed(f"{self.url} took longer than {self.seconds:g} seconds") from None
        finally:
            if wire is not None and reply is not None:
                await reply.close()
                if wire.is_reusable:
                    self._idle.append(wire)
                else:
                    wire.close()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = self._headers | {"content-length": str(len(content))}
        if content:
            headers["content-type"] = "application/json"
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content

    async def _begun(self, request: bytes) -> "tuple[_Wire, Reply]":
        """Sends a request on a kept connection, or on a new one. Servers close connections that are idle for seconds, so a kept one
        that gives no byte of an answer is replaced by a new one."""
        while True:
            is_new = not self._idle
            wire = await self._connected() if is_new else self._idle.pop()
            try:
                return wire, await wire.begin(request)
            except (OSError, EOFError) as error:
                wire.close()
                if is_new:
                    raise wire.broken(error) from None
            except BaseException:
                wire.close()
                raise

    async def _connected(self) -> "_Wire":
        try:
            async with asyncio.timeout(CONNECT_S):
                streams = await asyncio.open_connection(self.host, self.port, ssl=self._context, limit=LINE)
        except TimeoutError:
            why = f"no answer in {CONNECT_S:g} seconds"
        except ssl.SSLError as error:
            why = (getattr(error, "verify_message", None) or error.reason or "TLS failed").lower().replace("_", " ")
        except OSError as error:
            # Several addresses of one name give an error without a number, that quotes those of all.
            refused = isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error)
            why = "connection refused" if refused else (error.strerror or str(error)).lower()
        else:
            return _Wire(self.url, *streams)
        raise Failed(f"cannot connect to {self.url}: {why}", hint="is it running? `argosy serve MODEL` starts a server")


class _Wire:
    """One connection. is_reusable: the last response was read to its end, and the server keeps the connection."""

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.url, self.reader, self.writer = url, reader, writer
        self.is_reusable = False

    def broken(self, error: OSError | EOFError) -> Failed:
        why = (getattr(error, "strerror", None) or "it closed the connection").lower()
        return Failed(f"{self.url} broke off in the middle of an answer: {why}")

    def close(self) -> None:
        # Not closed politely: the other side may have stopped reading, and a server must notice at once.
        self.writer.transport.abort()

    async def begin(self, request: bytes) -> Reply:
        """Sends a request and reads the head of its response.

        Raises:
            OSError, EOFError: the connection is gone. Failed: the other side speaks no HTTP/1.
        """
        self.is_reusable = False
        self.writer.write(request)
        await self.writer.drain()
        status, version, headers = 100, "", {}
        # Statuses below 200 only announce the response.
        while status < 200:
            version, status = _status(await self._line())
            headers = {}
            while line := await self._line():
                name, colon, value = line.partition(":")
                if not colon or len(headers) > 200:
                    raise Failed(f"the server speaks no HTTP: {line[:60]!r}")
                headers[name.lower()] = value.strip()
        keeps = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return Reply(status, headers, self._body(status, headers, keeps))

    async def _line(self) -> str:
        try:
            line = await self.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise Failed(f"the server sent a line of more than {LINE:,} bytes") from None
        return line.rstrip(b"\r\n").decode("latin-1")

    async def _body(self, status: int, headers: Mapping[str, str], keeps: bool) -> AsyncGenerator[bytes, None]:
        try:
            async for block in self._blocks(status, headers):
                yield block
        except (OSError, EOFError) as error:
            raise self.broken(error) from None
        self.is_reusable = keeps and ("transfer-encoding" in headers or "content-length" in headers)

    async def _blocks(self, status: int, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        length = headers.get("content-length", "")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while size := _hexadecimal(await self._line()):
                yield await self.reader.readexactly(size)
                await self._line()
            while await self._line():
                pass
        elif status in (204, 304) or length.isdecimal():
            left = 0 if status in (204, 304) else int(length)
            while left:
                block = await self.reader.read(min(left, BLOCK))
                if not block:
                    raise EOFError
                left -= len(block)
                yield block
        else:
            while block := await self.reader.read(BLOCK):
                yield block


def _status(line: str) -> tuple[str, int]:
    version, _, rest = line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise Failed(f"the server speaks no HTTP: {line[:60]!r}")
    return version, int(rest[:3])


def _hexadecimal(line: str) -> int:
    size = line.partition(";")[0].strip()
    if not size or set(size.lower()) - set("0123456789abcdef") or len(size) > 8:
        raise Failed(f"the server sent a chunk without a size: {line[:60]!r}")
    return int(size, 16)


# ---------------------------------------------------------------- in this process


class Inside:
    """An ASGI application of this process, asked without a socket. Nothing limits how many requests it is given at a time."""

    def __init__(self, app: Callable[..., Any]):
        self.app = app

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[Reply]:
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
        gone, was_read = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal was_read
            if not was_read:
                was_read = True
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
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
                raise Failed(f"no answer to {method} {path}")
            found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
            yield Reply(start["status"], found, blocks())
        finally:
            # As a client that hangs up: the application ends the request and frees what it holds.
            gone.set()
            await asyncio.wait({work})
            # Starlette raises again what it has answered with 500.
            if not work.cancelled():
                work.exception()
