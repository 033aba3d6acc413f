"""Converts trees of settings to plain values, for YAML, JSON and comparison. This module does not know the origin of values."""

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from argosy.core.settings.schema import FieldShape, Settings, shape, shape_of


def dump(tree: Settings) -> dict[str, Any]:
    """Converts a tree to plain YAML values, including the tags of choices. Reading the result gives an equal tree."""
    return {name: _plain(shape_of(info), getattr(tree, name)) for name, info in type(tree).model_fields.items()}


def _plain(kind: FieldShape, value: Any) -> Any:
    if isinstance(value, Settings):
        tag = {kind.of.tag: kind.of.name_of(value)} if kind.kind == "choice" else {}
        return tag | dump(value)
    part = shape(kind.of) if kind.kind in ("list", "dict") else kind
    if isinstance(value, Mapping):
        return {str(name): _plain(part, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def flatten(tree: Settings | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by dotted key. Mappings and lists of groups are expanded. Other lists and empty mappings are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in (dump(tree) if isinstance(tree, Settings) else tree).items():
        key = dotted_key(prefix, name)
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        leaves |= flatten(value, key) if isinstance(value, Mapping) and value else {key: value}
    return leaves


def diff(a: Settings | Mapping[str, Any], b: Settings | Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The differences between two trees, as (dotted key, value in a, value in b). A value is None if a tree does not have the key."""
    left, right = flatten(a), flatten(b)
    keys = dict.fromkeys([*left, *right])
    same = {key for key in left.keys() & right.keys() if left[key] == right[key]}
    return [(key, left.get(key), right.get(key)) for key in keys if key not in same]


def dotted_key(key: str, name: str) -> str:
    """The dotted key of `name` in the group at `key`. The key of the root is empty."""
    return f"{key}.{name}" if key else name
