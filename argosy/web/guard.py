"""Checks of every request before a route sees it: number of headers, host, key."""

import hmac
from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from argosy.web.errors import ApiError

# Probes send no key, and learn only whether the server is up.
PUBLIC = ("/health", "/ping")
# Names and values together.
HEADER_BYTES = 32_768


class Guard:
    """Refuses requests by their headers, before any route sees them.

    Args:
        key: clients must send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY` as Anthropic's do; None: no key.
        local: accept only requests whose Host is a loopback name. Otherwise a web page could point a name of its own at 127.0.0.1 and
            use the server of whoever visits it (DNS rebinding). Pages of other origins are refused too: they can send some requests
            without asking first.
        headers: maximum number of headers of a request.
        public: paths that need no key, besides those of probes.
        apart: paths with a key of their own instead.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        local: bool,
        headers: int,
        public: Iterable[str] = (),
        apart: Mapping[str, str] | None = None,
    ):
        self.app, self.local, self.headers = app, local, headers
        self.public = frozenset((*PUBLIC, *public))
        self._key = None if key is None else expected_key(key)
        self._apart = {path: expected_key(route_key) for path, route_key in (apart or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)):
            await refusal.response(scope["path"])(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if len(headers) > self.headers or sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES:
            return ApiError(f"more than {self.headers} headers or {HEADER_BYTES} bytes of them", status=431)
        if self.local and not is_local(host_of(headers.get("host", ""))):
            problem = "this server answers to localhost only; one with `api_key=` or `open=true` answers to any name"
            return ApiError(problem, status=403, code="unknown_host")
        origin = headers.get("origin")
        if self.local and origin is not None and not is_local(host_of(origin.partition("://")[2])):
            return ApiError("this server answers to pages of localhost only", status=403, code="unknown_origin")
        expected = self._apart.get(scope["path"], self._key)
        if expected is None or scope["path"] in self.public:
            return None
        if has_key(headers.get("authorization", ""), headers.get("x-api-key", ""), expected):
            return None
        more = {"www-authenticate": "Bearer"}
        return ApiError("wrong or missing API key", status=401, code="invalid_api_key", headers=more)


def expected_key(key: str) -> bytes:
    """What `has_key` compares with."""
    return f"bearer {key}".encode()


def has_key(authorization: str, api_key: str, expected: bytes) -> bool:
    """Whether one of the two headers holds the key.

    Args:
        authorization: `Bearer KEY`. api_key: the value of `x-api-key`.
    """
    scheme, _, key = authorization.partition(" ")
    credentials = f"{scheme.lower()} {key.strip()}", f"bearer {api_key}"
    # Both are always compared, so that timing does not reveal which one was sent.
    return bool([credential for credential in credentials if hmac.compare_digest(credential.encode(), expected)])


def host_of(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_local(host: str) -> bool:
    """Whether this is a name or an address of the loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
