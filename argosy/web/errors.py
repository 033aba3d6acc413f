"""Errors of an API, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; those of /v1/messages in Anthropic's:
{"type": "error", "error": {"type", "message"}}; those of the Open Inference Protocol in its own: {"error": message}.

A message says what is wrong with the request. It never contains a path of this machine or the text of an unexpected exception,
which goes to stderr.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from argosy.core.errors import ArgosyError


class ApiError(Exception):
    """A refused or failed request.

    status: HTTP status.
    param: the field at fault.
    code: a machine-readable reason.
    headers: extra response headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.headers = message, status, param, code, headers

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def type(self) -> str:
        names = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return names.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape. It has no `param`; the message names the field."""
        kind = ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """The response, in the shape of the API that owns the path."""
        if path == "/v2" or path.startswith(INFERENCE):
            return Json({"error": self.message}, self.status, self.headers)
        body = self.anthropic() if path.startswith("/v1/messages") else self.body()
        return Json(body, self.status, self.headers)

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same error in the field names of another API.

        Args:
            names: our chat field -> the field of the request that was translated into it.
        """
        name, dot, rest = (self.param or "").partition(".")
        if name not in names:
            return self
        message = re.sub(rf"`{re.escape(name)}(?=[`.])", f"`{names[name]}", self.message)
        return ApiError(
            message, status=self.status, param=names[name] + dot + rest, code=self.code, headers=self.headers
        )


# Of the Open Inference Protocol. Others below /v2 are Cohere's.
INFERENCE = tuple(
    f"/v2/{name}"
    for name in ("health/", "models/", "repository/", "systemsharedmemory", "cudasharedmemory", "trace", "logging")
)
ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside are renamed by `ApiError.renamed`."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from None


class Json(Response):
    """A JSON document. Lone surrogates, which a client's JSON can hold and UTF-8 cannot, become question marks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def service_unavailable(message: str, code: str, retry: int = 1) -> ApiError:
    """A refusal that is not the client's fault; it may retry after `retry` seconds."""
    return ApiError(message, status=503, code=code, headers={"retry-after": str(retry)})


def unknown_model(name: str, served: str | None = None) -> ApiError:
    """The refusal of a model, or an adapter, that this server does not have.

    served: the name of the model that it has."""
    has = "" if served is None else f", this server has `{served}`"
    return ApiError(f"the model `{name[:128]}` does not exist{has}", status=404, param="model", code="model_not_found")


def input_error(error: ArgosyError, param: str | None = None) -> ApiError:
    """An ArgosyError as an API error, without its location, which may be a path."""
    return ApiError(f"{error.what} ({error.hint})" if error.hint else error.what, param=param)


def validation_error(error: ValidationError, field_names: Iterable[str]) -> ApiError:
    """The error for the first invalid field of a request."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    name = str(place[0]) if place else None
    param = shorten_for_echo(".".join(map(str, place[:3])) if name == "messages" else name)
    if first["type"] == "extra_forbidden":
        close = get_close_matches(param or "", field_names, n=1, cutoff=0.6) if len(place) == 1 else []
        hint = f", did you mean `{close[0]}`?" if close else ""
        return ApiError(f"unknown field `{param}`{hint}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(f"`{param}`: {problem[:1].lower()}{problem[1:]}", param=param)


def shorten_for_echo(name: str | None) -> str | None:
    """A client's own text, cut to a length that is safe to echo."""
    return name if name is None or len(name) <= 64 else f"{name[:61]}..."
