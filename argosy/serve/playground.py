"""The playground and the dashboard at `/`: files of our own, which load nothing from elsewhere and call this server's API only.

The files hold nothing about the model, so they need no key. Everything else, `/web/model` included, does where the server has one.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.serve.service import Service
from argosy.web.errors import Json

FOLDER = Path(__file__).parent / "web"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    # Trusted types: in browsers that have them, assigning text to innerHTML or the like is an error.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A page from before an upgrade would call the API of after it.
    "cache-control": "no-cache",
}


def page_files() -> dict[str, Path]:
    """The files by their paths on the server."""
    found = {f"/web/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    return {"/": found.pop("/web/index.html"), **found}


def page_routes(service: Service, keyed: bool) -> list[Route]:
    """The routes of the page.

    Args:
        keyed: the server has an API key, so that the page asks for it before its first request.
    """

    async def model(request: Request) -> Response:
        return Json(page_facts(service), headers={"cache-control": "no-store"})

    pages = [Route(path, _file(file, keyed), methods=["GET"]) for path, file in page_files().items()]
    return [*pages, Route("/web/model", model, methods=["GET"])]


def _file(path: Path, keyed: bool) -> Any:
    content = path.read_bytes().replace(b'data-key=""', f'data-key="{str(keyed).lower()}"'.encode())

    async def route(request: Request) -> Response:
        return Response(content, media_type=TYPES[path.suffix], headers=HEADERS)

    return route


def page_facts(service: Service) -> dict[str, Any]:
    """The facts that the page needs of the model: whether it chats, its context in tokens, its sampling defaults, and how many of the
    likeliest tokens it may ask for."""
    return {
        "name": service.name,
        "chat": "default" in (getattr(service.lm.tokenizer, "chat_templates", None) or {}),
        "context": service.context,
        "defaults": service.defaults,
        "logprobs": service.limits.logprobs,
    }
