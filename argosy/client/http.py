"""HTTP/1.1 for `client.client`: connections that are kept alive, chunked bodies, TLS, and a clear error for each way in which a server
can fail.

It follows no redirects and uses no proxy, because a benchmark must measure the server that was named.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from argosy.client.client import LINE, ConnectionFailed, HttpReply
from argosy.core.errors import BadInput

# The most bytes that are read at a time from a body that is not chunked.
BLOCK = 2**16
CONNECT_S = 10.0


class Http:
    """Connections to a server. They are kept alive and reused, each for one request at a time.

    Args:
        url: the URL of the server, with or without `/v1` at the end.
        key: the API key, sent as `Authorization: Bearer KEY`; None: no key is sent.
        seconds: the time limit of one request.

    Raises:
        BadInput: `url` is no HTTP URL, or the key cannot be sent in a header.
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
        url_host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{url_host}:{self.port}{self.prefix}"
        self.seconds = seconds
        self._headers = {"host": f"{url_host}:{self.port}", "accept": "application/json, text/event-stream"}
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
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()
        # The event loop closes the transports in its next iteration.
        await asyncio.sleep(0)

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpReply]:
        """As `ClientTransport.send`. After `seconds` the request fails with `ConnectionFailed`."""
        wire = reply = None
        try:
            async with asyncio.timeout(self.seconds):
                wire, reply = await self._begun(self._request(method, path, body))
                yield reply
        except TimeoutError:
            raise ConnectionFailed(f"{self.url} took longer than {self.seconds:g} seconds") from None
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

    async def _begun(self, request: bytes) -> "tuple[_Wire, HttpReply]":
        """Sends a request on an idle connection, or on a new one. Returns the connection and the response. Servers close connections
        that were idle for seconds, so if an idle connection fails before the response begins, another one is used."""
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
            # If a name has several addresses, the error has no `errno`, and quotes the errors of all.
            refused = isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error)
            why = "connection refused" if refused else (error.strerror or str(error)).lower()
        else:
            return _Wire(self.url, *streams)
        raise ConnectionFailed(f"cannot connect to {self.url}: {why}", hint="is it running? `argosy serve MODEL` starts a server")


class _Wire:
    """One connection.

    is_reusable: whether the last response was read to its end, and the server keeps the connection alive.
    """

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.url, self.reader, self.writer = url, reader, writer
        self.is_reusable = False

    def broken(self, error: OSError | EOFError) -> ConnectionFailed:
        why = (getattr(error, "strerror", None) or "it closed the connection").lower()
        return ConnectionFailed(f"{self.url} broke off in the middle of an answer: {why}")

    def close(self) -> None:
        # The connection is aborted rather than closed, so that the server notices at once, even if it has stopped reading.
        self.writer.transport.abort()

    async def begin(self, request: bytes) -> HttpReply:
        """Sends a request and reads the head of its response.

        Raises:
            OSError, EOFError: the connection is broken.
            ConnectionFailed: the response is no HTTP/1.
        """
        self.is_reusable = False
        self.writer.write(request)
        await self.writer.drain()
        status, version, headers = 100, "", {}
        # Responses with a status below 200 are informational, and another one follows.
        while status < 200:
            version, status = _status(await self._line())
            headers = {}
            while line := await self._line():
                name, colon, value = line.partition(":")
                if not colon or len(headers) > 200:
                    raise ConnectionFailed(f"the server speaks no HTTP: {line[:60]!r}")
                headers[name.lower()] = value.strip()
        keeps = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return HttpReply(status, headers, self._body(status, headers, keeps))

    async def _line(self) -> str:
        try:
            line = await self.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise ConnectionFailed(f"the server sent a line of more than {LINE:,} bytes") from None
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
            remaining = 0 if status in (204, 304) else int(length)
            while remaining:
                block = await self.reader.read(min(remaining, BLOCK))
                if not block:
                    raise EOFError
                remaining -= len(block)
                yield block
        else:
            while block := await self.reader.read(BLOCK):
                yield block


def _status(line: str) -> tuple[str, int]:
    version, _, rest = line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ConnectionFailed(f"the server speaks no HTTP: {line[:60]!r}")
    return version, int(rest[:3])


def _hexadecimal(line: str) -> int:
    size = line.partition(";")[0].strip()
    if not size or set(size.lower()) - set("0123456789abcdef") or len(size) > 8:
        raise ConnectionFailed(f"the server sent a chunk without a size: {line[:60]!r}")
    return int(size, 16)
