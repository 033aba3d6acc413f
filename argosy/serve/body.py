"""The body of a request: JSON, within the limits of its bytes and of the time it may take to arrive."""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from argosy.serve.errors import ApiError
from argosy.serve.settings import ServerLimits


async def read_json_body(request: Request, limits: ServerLimits, *, may_be_empty: bool = False) -> Any:
    """Reads and parses the body.

    Args:
        may_be_empty: a request without a body is one with an empty object, whatever its type.

    Raises:
        ApiError: it is not JSON, too long, or too slow.
        ClientDisconnect: the client went away before its end.
    """
    if not may_be_empty:
        _check_type(request)
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for part in request.stream():
                raw += part
                if len(raw) > limits.body:
                    raise ApiError(f"the body has more than {limits.body} bytes", status=413)
    except TimeoutError:
        raise ApiError(f"the body took more than {limits.upload_seconds:g} seconds", status=408) from None
    if may_be_empty:
        if not raw:
            return {}
        _check_type(request)
    try:
        return json.loads(bytes(raw), parse_constant=_no_number)
    # A ValueError covers what is not UTF-8, and numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        why = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(f"the body is not JSON{why}") from None


def _check_type(request: Request) -> None:
    """Raises: ApiError: the body is of another type. Browsers send others to any server without asking it first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("send `Content-Type: application/json`", status=415)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
