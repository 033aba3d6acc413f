"""Pages of a server at `/`: files of our own, which load nothing from elsewhere and call this server's API only.

The files hold nothing about a model, so they need no key. Everything else does, where the server has one. `static` has what the pages
of all servers share.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SHARED = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# In place of `<!-- key -->` in a page; `keyForm` of api.js shows it where the server asks for a key.
KEY_FORM = b"""<form id="key" class="panel" hidden>
  <label for="key-value">This server needs an API key. It stays in this tab until you close it.</label>
  <input id="key-value" type="password" autocomplete="off" required>
  <button class="main">Use key</button>
</form>"""
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


def page_files(folder: Path) -> dict[str, Path]:
    """The files of a server's page by their paths on it: those of its folder, whose `index.html` is at `/`, and the shared ones."""
    files = sorted([*SHARED.iterdir(), *folder.iterdir()])
    assets = {f"/web/{path.name}": path for path in files if path.suffix in TYPES}
    return {"/": assets.pop("/web/index.html"), **assets}


def page_routes(folder: Path, keyed: bool) -> list[Route]:
    """The routes of these files.

    Args:
        keyed: the server has an API key, so that the page asks for it before its first request.
    """
    return [Route(path, _file(file, keyed), methods=["GET"]) for path, file in page_files(folder).items()]


def _file(path: Path, keyed: bool) -> Any:
    content = path.read_bytes().replace(b'data-key=""', f'data-key="{str(keyed).lower()}"'.encode())
    content = content.replace(b"<!-- key -->", KEY_FORM)

    async def route(request: Request) -> Response:
        return Response(content, media_type=TYPES[path.suffix], headers=HEADERS)

    return route
