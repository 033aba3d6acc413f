"""Functions that inspect JSON schemas, for notations whose values are not JSON."""

from collections.abc import Mapping
from typing import Any, TypeVar

from argosy.core.errors import BadInput

T = TypeVar("T", dict[str, Any], list[Any])

KINDS: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
# A schema that admits any value.
ANYTHING: Mapping[str, Any] = {}
# The longest chain of references that is followed.
DEEPEST = 8


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema, or, if it is a `$ref`, the schema in `root` that it refers to."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        node: Any = root
        for part in schema["$ref"][2:].split("/"):
            node = node.get(part) if isinstance(node, Mapping) else None
        schema = node
    return schema if isinstance(schema, Mapping) else ANYTHING


def schema_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types of values that a schema admits; only `string` if it names none."""
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
    """The value of the keyword `word` in a schema, or `empty` if the schema lacks it.

    Raises:
        BadInput: the value has another type than `empty`.
    """
    value = schema.get(word, empty)
    if not isinstance(value, type(empty)):
        raise BadInput(f"`{word}` of a schema is no {KINDS[type(empty)]}")
    return value
