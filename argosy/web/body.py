"""The body of a request, within the limits of its bytes and of the time it may take to arrive.

A body may be compressed by gzip or deflate; the limit is on what it holds.
"""

import asyncio
import zlib
from typing import Any

from starlette.requests import Request

from argosy.web.errors import ApiError
from argosy.web.json_text import parsed_json
from argosy.web.settings import WebLimits

# Of zlib: its own format is what HTTP calls deflate.
WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def read_json_body(request: Request, limits: WebLimits, *, may_be_empty: bool = False) -> Any:
    """Reads and parses the body.

    Args:
        may_be_empty: a request without a body is one with an empty object, whatever its type.

    Raises:
        ApiError: it is not JSON, too long, or too slow.
        ClientDisconnect: the client went away before its end.
    """
    if not may_be_empty:
        _check_type(request)
    raw = await read_body(request, limits)
    if may_be_empty:
        if not raw:
            return {}
        _check_type(request)
    return parsed_json(bytes(raw))


async def read_body(request: Request, limits: WebLimits) -> bytearray:
    """The bytes of the body, decompressed.

    Raises:
        ApiError: it is too long, too slow, or compressed in another way.
        ClientDisconnect: the client went away before its end.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *WINDOWS):
        raise ApiError("send `Content-Encoding: gzip`, `deflate` or none", status=415)
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for part in request.stream():
                raw += part
                if len(raw) > limits.body:
                    raise ApiError(f"the body has more than {limits.body} bytes", status=413)
    except TimeoutError:
        raise ApiError(f"the body took more than {limits.upload_seconds:g} seconds", status=408) from None
    return raw if encoding == "identity" else _decompressed(raw, encoding, limits)


def _decompressed(raw: bytearray, encoding: str, limits: WebLimits) -> bytearray:
    """What a body holds. No more than the limit is ever decompressed."""
    stream = zlib.decompressobj(WINDOWS[encoding])
    try:
        content = stream.decompress(raw, limits.body + 1)
    except zlib.error:
        content = None
    if content is not None and len(content) > limits.body:
        raise ApiError(f"the body has more than {limits.body} bytes", status=413)
    if content is None or not stream.eof or stream.unused_data:
        raise ApiError(f"the body is not in {encoding}")
    return bytearray(content)


def _check_type(request: Request) -> None:
    """Raises: ApiError: the body is of another type. Browsers send others to any server without asking it first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("send `Content-Type: application/json`", status=415)
