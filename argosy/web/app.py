"""Routes behind the checks that every server has, and what becomes of errors."""

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.web.errors import ApiError
from argosy.web.guard import Guard
from argosy.web.no_route import no_route


def guarded_app(routes: Sequence[Route], **settings: Any) -> Starlette:
    """An application with these routes behind a `Guard`, whose settings these are."""
    handlers = {ApiError: refusal_response, HTTPException: no_route, ClientDisconnect: client_gone, Exception: broken}
    guard = Middleware(Guard, **settings)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)  # pyright: ignore[reportArgumentType]


async def refusal_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)


async def broken(request: Request, error: Exception) -> Response:
    """An unexpected exception: its traceback goes to stderr, and none of it to the client."""
    with suppress(OSError):
        traceback.print_exception(error, file=sys.stderr)
    return ApiError("internal error", status=500).response(request.url.path)
