"""Reads the structure that the completions of a request must match: OpenAI's `response_format`, vLLM's `structured_outputs`, and tool
calls."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.infer.tools.grammar import Structure, read_structure
from argosy.serve.openai.fields import GenerationFields
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError, input_error

# The most characters of a GBNF grammar. The time to translate it to Lark grows with the square of its length: 16 kB take 1 s, 118 kB a
# minute.
MOST_GBNF = 16_384
# The most characters of a line, which may be a regular expression. The time to compile one grows with the square of its length: 16 kB
# may take 5 s.
MOST_LINE = 8_192


@dataclass(frozen=True)
class StructureRequest:
    """The structure that a completion must match.

    structure: the grammar.
    param: the field of the request that asks for it, for errors.
    """

    structure: Structure
    param: str


def structure_request(fields: GenerationFields, limits: ServerLimits) -> StructureRequest | None:
    """Reads the structure that `response_format` or `structured_outputs` ask for; None: any text.

    Raises:
        ApiError: both are given, a format is not supported, or it exceeds the limits.
    """
    if fields.structured_outputs is None:
        structure = _format(fields.response_format)
        return None if structure is None else StructureRequest(check_structure(structure, "response_format", limits), "response_format")
    if fields.response_format not in (None, {"type": "text"}):
        raise ApiError("`response_format` and `structured_outputs` exclude each other", param="structured_outputs")
    return StructureRequest(check_structure(fields.structured_outputs, "structured_outputs", limits), "structured_outputs")


def _format(response_format: Any) -> dict[str, Any] | None:
    """Converts a `response_format` to the fields of `structured_outputs`; None: any text."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"json_object": True}
    if kind != "json_schema" or set(response_format) != {"type", "json_schema"}:
        problem = "`response_format` is of type text, json_object or json_schema"
        raise ApiError(problem, param="response_format", code="unsupported_parameter")
    inner = response_format["json_schema"]
    unknown = sorted(set(inner) - {"name", "schema", "strict", "description"}) if isinstance(inner, dict) else ["json_schema"]
    if unknown:
        raise ApiError(f"`response_format.json_schema` has no `{unknown[0][:64]}`", param="response_format")
    if not isinstance(inner.get("name"), str):
        raise ApiError("`response_format.json_schema.name` is missing", param="response_format")
    if not isinstance(inner.get("schema"), dict):
        raise ApiError("`response_format.json_schema.schema` is missing", param="response_format")
    # `strict` has no effect, because a schema is always matched exactly.
    if not isinstance(inner.get("strict"), bool | None):
        raise ApiError("`response_format.json_schema.strict` is true or false", param="response_format")
    return {"json": inner["schema"]}


def check_structure(fields: Mapping[str, Any], param: str, limits: ServerLimits) -> Structure:
    """Checks the fields of `structured_outputs`, and returns the structure.

    Args:
        param: the field of the request that asks for it, for errors.

    Raises:
        ApiError: the structure is invalid, or larger or deeper than the limits allow.
    """
    fields = dict(fields)
    if isinstance(fields.get("json"), str):
        with suppress(ValueError, RecursionError):
            fields["json"] = json.loads(fields["json"])
    check_size(fields, param, limits)
    grammar = fields.get("grammar")
    if isinstance(grammar, str) and "::=" in grammar and len(grammar) > MOST_GBNF:
        raise ApiError(f"`{param}`: a grammar in GBNF has at most {MOST_GBNF} characters, write it in Lark", param=param)
    try:
        return read_structure(fields)
    except ArgosyError as error:
        raise grammar_error(error, param) from None


def check_size(fields: Any, param: str, limits: ServerLimits) -> None:
    """Checks a JSON value against the limits on schemas.

    Raises:
        ApiError: it is too large, nested too deeply, or has a line that is too long.
    """
    level, depth = [fields], 0
    while level := [inner for node in level if isinstance(node, dict | list) for inner in _inside(node)]:
        depth += 1
        if any(isinstance(node, str) and max(map(len, node.split("\n"))) > MOST_LINE for node in level):
            raise ApiError(f"`{param}` has a line of more than {MOST_LINE} characters", param=param)
        if depth > limits.schema_depth + 1:
            raise ApiError(f"`{param}` is nested deeper than {limits.schema_depth} levels", param=param)
    size = len(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
    if size > limits.schema_bytes:
        raise ApiError(f"`{param}` has {size} bytes, at most {limits.schema_bytes}", param=param)


def _inside(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def grammar_error(error: ArgosyError, param: str) -> ApiError:
    """The error for a schema or grammar that cannot be compiled."""
    refusal = input_error(error, param)
    return ApiError(f"`{param}`: {refusal.message}", param=param)
