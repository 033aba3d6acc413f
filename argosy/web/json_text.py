"""JSON of clients."""

import json
from typing import Any

from argosy.web.errors import ApiError


def parsed_json(raw: bytes) -> Any:
    """Raises: ApiError: it is not JSON."""
    try:
        return json.loads(raw, parse_constant=_no_number)
    # A ValueError covers what is not UTF-8, and numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        why = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(f"the body is not JSON{why}") from None


def parsed_object(raw: bytes) -> dict[str, Any]:
    """Raises: ApiError: it is no JSON object."""
    document = parsed_json(raw)
    if not isinstance(document, dict):
        raise ApiError("the body is no JSON object")
    return document


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
