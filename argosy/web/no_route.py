"""The answer to an address that no route has, or that has none with this method: it says what there is.

Clients of OpenAI and vLLM often leave `/v1` out of their base URL, or write it twice.
"""

from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.web.errors import ApiError, shorten_for_echo


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    request_line = f"{shorten_for_echo(request.method)} {shorten_for_echo(path)}"
    if error.status_code == 405:
        takes = ", ".join(sorted(headers["Allow"].split(", ")))
        return ApiError(f"{request_line}: this address takes {takes}", status=405, headers=headers).response(path)
    addresses = [route.path for route in request.app.routes if isinstance(route, Route) and not _is_page(route.path)]
    names = [address for address in addresses if "{" not in address]
    bare = path.rstrip("/").replace("/v1", "")
    near = [name for name in names if name.removeprefix("/v1") == bare] or get_close_matches(path[:64], names, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(addresses)}"
    return ApiError(f"there is nothing at {request_line}; {hint}", status=error.status_code, headers=headers).response(path)


def _is_page(path: str) -> bool:
    """Whether an address is part of the playground: a file, or what it reads."""
    return path == "/" or "." in path or path.startswith("/web/")
