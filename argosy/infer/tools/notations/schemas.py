"""Questions about a JSON schema, for notations that are no JSON."""

from collections.abc import Mapping
from typing import Any, TypeVar

from argosy.core.errors import BadInput

T = TypeVar("T", dict[str, Any], list[Any])

KINDS: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
# A schema that says nothing.
ANYTHING: Mapping[str, Any] = {}
# References to references.
DEEPEST = 8


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that it refers to in the same document."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        node: Any = root
        for part in schema["$ref"][2:].split("/"):
            node = node.get(part) if isinstance(node, Mapping) else None
        schema = node
    return schema if isinstance(schema, Mapping) else ANYTHING


def schema_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types of values that a schema admits; a text where it does not say."""
    types, pending, seen = set[str](), [schema], set[int]()
    while pending:
        node = resolve_schema(pending.pop(), root)
        # A client's schema may refer to itself.
        if id(node) in seen:
            continue
        seen.add(id(node))
        declared = node.get("type")
        types |= {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
        types |= {KINDS[type(value)] for value in ([node["const"]] if "const" in node else _list(node, "enum"))}
        pending += [way for name in ("anyOf", "oneOf") for way in _list(node, name)]
    return types or {"string"}


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    return schema[name] if isinstance(schema.get(name), list) else []


def sub_schema(schema: Mapping[str, Any], word: str, empty: T) -> T:
    """The value of a word in a schema; `empty` without it.

    Raises:
        BadInput: it is of another type than `empty`.
    """
    value = schema.get(word, empty)
    if not isinstance(value, type(empty)):
        raise BadInput(f"`{word}` of a schema is no {KINDS[type(empty)]}")
    return value
