"""Bodies that are compressed: read within the limit of what they hold, or refused."""

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from starlette.requests import Request

from argosy.web.body import read_body
from argosy.web.errors import ApiError
from argosy.web.settings import WebLimits

TEXT = b'{"inputs": [1, 2, 3]}' * 20
# Without the time, which would be in the tests' names, and two processes may collect them in different seconds.
GZIPPED = gzip.compress(TEXT, mtime=0)


def read(body: bytes, encoding: str | None, limit: int = 1000) -> bytes:
    """The body as the server reads it, in pieces."""
    parts = [body[i : i + 7] for i in range(0, len(body), 7)] or [b""]

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    headers = [] if encoding is None else [(b"content-encoding", encoding.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    return bytes(asyncio.run(read_body(request, WebLimits(body=limit))))


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(TEXT, None), (TEXT, "identity"), (GZIPPED, "gzip"), (GZIPPED, "GZIP"), (zlib.compress(TEXT), "deflate")],
)
def test_a_body_is_decompressed(body: bytes, encoding: str | None):
    assert read(body, encoding) == TEXT


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (TEXT, "br", 415),
        (TEXT, "gzip, gzip", 415),
        (TEXT, "gzip", 400),
        (b"", "gzip", 400),
        (GZIPPED[:-9], "gzip", 400),
        (GZIPPED[:-1] + b"x", "gzip", 400),
        (GZIPPED + b"more", "gzip", 400),
        (zlib.compress(TEXT), "gzip", 400),
        # A thousandth of what it holds.
        (gzip.compress(bytes(900_000), mtime=0), "gzip", 413),
        (zlib.compress(bytes(1001)), "deflate", 413),
        (bytes(1001), None, 413),
    ],
)
def test_what_is_not_compressed_so_or_holds_too_much_is_refused(body: bytes, encoding: str | None, status: int):
    with pytest.raises(ApiError) as refused:
        read(body, encoding)
    assert refused.value.status == status
