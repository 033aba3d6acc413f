"""Generates text from settings: the reference page, the JSON schema for editors, and the origin of each setting in a run."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

from argosy.core.registry import Registry
from argosy.core.settings import DEFAULT, Reading, dump, flatten, mistakes
from argosy.core.settings.scalars import yaml_line
from argosy.core.settings.schema import Choice, FieldShape, Settings, documented_fields, members, shape, shape_of

_BOUNDS = (("gt", "> "), ("ge", "≥ "), ("lt", "< "), ("le", "≤ "), ("multiple_of", "multiple of "))
_HUMAN_NUMBER = r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?([kKMBT]|[KMGT]i)?$"


# ---- the reference page


def settings_reference(schema: type[Settings]) -> str:
    """The reference of all settings as Markdown tables: key, type, default, meaning. A choice lists its classes, each with its keys."""
    return "\n".join(["# Settings", "", *_section(schema, "", "The run itself")]).rstrip() + "\n"


def tables(registry: Registry, title: str) -> str:
    """The settings of each class of a registry as sections of such a page. `title` is that of a section, with NAME for the name of the
    class."""
    sections = (_section(registry[name], "", title.replace("NAME", name), class_summary(registry[name])) for name in registry)
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _section(cls: type[Settings], prefix: str, title: str, about: str = "") -> list[str]:
    lines = [f"## {title}", "", *([about, ""] if about else [])]
    rows, below = [], []
    for name, info in documented_fields(cls).items():
        key, kind = f"{prefix}{name}", shape_of(info)
        if kind.kind in ("leaf", "list", "dict"):
            cells = [f"`{key}`", type_text(info), default_text(info), info.description]
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
            below += _item_sections(kind, key, info)
        elif kind.kind == "group":
            about = _cell(info.description) or class_summary(kind.of)
            below.append(_section(kind.of, f"{key}.", f"`{key}`", about))
        elif kind.kind == "choice":
            below += _choice_sections(kind.of, key, info)
    if rows:
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return lines + [line for section in below for line in section]


def _choice_sections(choice: Choice, key: str, info: FieldInfo) -> Iterator[list[str]]:
    names = ", ".join(f"`{name}`" for name in choice.registry)
    about = [_cell(info.description), ""] if info.description else []
    line = f"`{key}.{choice.tag}`, the {choice.registry.noun}: {names}; {_default_phrase(info)}."
    yield [f"## `{key}`", "", *about, line, ""]
    for name in choice.registry:
        cls = choice.pick(name)
        yield _section(cls, f"{key}.", f"`{key}.{choice.tag}={name}`", class_summary(cls))


def _item_sections(kind: FieldShape, key: str, info: FieldInfo) -> Iterator[list[str]]:
    item = shape(kind.of) if kind.kind != "leaf" else kind
    if item.kind == "choice":
        yield from _choice_sections(item.of, f"{key}.*", info)
    elif item.kind == "group":
        yield _section(item.of, f"{key}.*.", f"`{key}.*`", class_summary(item.of))


def _default_phrase(info: FieldInfo) -> str:
    default = default_text(info)
    return default if default == "required" else f"default {default}"


def class_summary(cls: type[Settings]) -> str:
    """The first paragraph of the docstring of a class."""
    docstring = cls.__dict__.get("__doc__") or ""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def type_text(info: FieldInfo) -> str:
    """The type of a key as it is shown to users: `float > 0`, `int | none`, `split | fit`."""
    choice = shape_of(info)
    if choice.kind == "choice":
        return " | ".join(choice.of.registry)
    pairs = [(mark, name, sign) for mark in info.metadata for name, sign in _BOUNDS if hasattr(mark, name)]
    bounds = [f"{sign}{getattr(mark, name):g}" for mark, name, sign in pairs]
    return ", ".join([" ".join([_type(info.annotation), *bounds[:1]]), *bounds[1:]])


def _type(hint: Any) -> str:
    if len(members(hint)) > 1:
        return " | ".join(map(_type, members(hint)))
    if get_origin(hint) is Annotated:
        return type_text(FieldInfo.from_annotation(hint))
    if get_origin(hint) is Literal:
        return " | ".join(yaml_line(option) for option in get_args(hint))
    if hint is type(None):
        return "none"
    args = [_type(arg) for arg in get_args(hint) if arg is not Ellipsis]
    name = {"str": "text", "Path": "path"}.get(getattr(hint, "__name__", ""), getattr(hint, "__name__", str(hint)))
    return f"{name}[{', '.join(args)}]" if args else name


def default_text(info: FieldInfo) -> str:
    """The default of a key as users write it; `required` if there is none."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    if isinstance(default, Settings):
        return f"`{yaml_line(dump(default))}`"
    plain = isinstance(default, int | float | str | None | list | tuple | dict)
    return f"`{value_text(default if plain else str(default))}`"


# ---- the schema for editors


class _AsWritten(GenerateJsonSchema):
    """Generates a schema that accepts in editors what `core.settings` accepts: `25k` as a number, `none`, `off` as a bool, `lang: no`
    as text."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        document = super().model_schema(schema)
        for name, info in documented_fields(schema["cls"]).items():
            if info.description and name in (properties := document.get("properties", {})):
                properties[name] = {"description": info.description} | properties[name]
        return document

    def str_schema(self, schema: Any) -> dict[str, Any]:
        return super().str_schema(schema) | {"type": ["string", "number", "boolean"]}

    def bool_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().bool_schema(schema), {"enum": ["yes", "no", "on", "off"]}]}

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().nullable_schema(schema), {"enum": ["none"]}]}

    def int_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().int_schema(schema), {"type": "string", "pattern": _HUMAN_NUMBER}]}

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), {"type": "string", "pattern": _HUMAN_NUMBER}]}


def json_schema(schema: type[Settings]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one layer of settings. No key is required, because other layers may set it."""
    document = schema.model_json_schema(schema_generator=_AsWritten)
    return _without_required({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})


def _without_required(node: Any) -> Any:
    """Removes `required` everywhere, except for the tag of a choice, which distinguishes the options."""
    if isinstance(node, list):
        return [_without_required(item) for item in node]
    if not isinstance(node, dict):
        return node
    tags = {name for name, item in node.get("properties", {}).items() if isinstance(item, dict) and "const" in item}
    rest = {key: item for key, item in node.items() if key != "required" or not isinstance(item, list)}
    rest = {key: _without_required(item) for key, item in rest.items()}
    return rest | ({"required": sorted(tags)} if tags else {})


# ---- one run


def explain(reading: Reading, key: str) -> str:
    """Describes one key of a run: its value, type, default and meaning, its origin, and the value in every layer. For a group, lists
    its keys.

    Raises:
        BadInput: the run has no such key.
    """
    leaves = flatten(reading.value)
    if key not in leaves:
        return _explain_group(reading, key, leaves)
    lines = [f"{key} = {value_text(leaves[key])}"]
    info = _field(reading.value, key.split("."))
    if isinstance(info, Choice):
        lines.append(f"  {info.registry.noun}: {' | '.join(info.registry)}")
    elif info is not None:
        lines.append(f"  {type_text(info)}, {_default_phrase(info).replace('`', '')}")
        lines += [f"  {line}" for line in (info.description or "").splitlines()]
    lines += ["", f"set by {reading.origin[key]}"]
    tried = reading.tried.get(key, [])
    if len(tried) > 1:
        width = max(len(origin) for origin, _ in tried)
        lines += [f"  {origin:{width}}  {value_text(value)}" for origin, value in tried]
    return "\n".join(lines)


def value_text(value: Any) -> str:
    """A value as it is written in a `key=value` word."""
    value = dump(value) if isinstance(value, Settings) else value
    return "none" if value is None else yaml_line(value)


def _explain_group(reading: Reading, key: str, leaves: dict[str, Any]) -> str:
    inside = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
    if not inside:
        groups = {leaf[:i] for leaf in leaves for i, letter in enumerate(leaf) if letter == "."}
        raise mistakes.unknown_key(key, None, replace(reading.names, known=[*leaves, *groups]))
    return _aligned_comments((f"{leaf} = {value_text(leaves[leaf])}", reading.origin[leaf]) for leaf in inside)


def _field(tree: Any, path: list[str]) -> FieldInfo | Choice | None:
    """The field that a dotted key names, or its choice if the key is a tag. None for a key inside a plain mapping."""
    info: FieldInfo | None = None
    for i, name in enumerate(path):
        if not isinstance(tree, Settings):
            tree = tree[int(name) if isinstance(tree, list | tuple) else name] if tree else None
            continue
        if name not in type(tree).model_fields:
            field_shape = shape_of(info) if info else None
            return field_shape.of if field_shape and field_shape.kind == "choice" and i == len(path) - 1 else None
        info, tree = documented_fields(type(tree))[name], getattr(tree, name)
    return info


def annotated_yaml(reading: Reading) -> str:
    """The merged settings as YAML, with the origin of each key as a comment: the `settings.yml` of a run directory."""
    return _aligned_comments(_lines(dump(reading.value), "", "", reading.origin)) + "\n"


def commented_yaml(reading: Reading) -> str:
    """A recipe to start from: all settings of a run as YAML comments, each with the first sentence of its documentation."""
    lines = []
    for line, key in _lines(dump(reading.value), "", "", _Itself()):
        info = _field(reading.value, key.split(".")) if key else None
        about = mistakes.first_sentence(info.description) if isinstance(info, FieldInfo) else None
        lines.append((f"# {line}", about))
    return _aligned_comments(lines) + "\n"


class _Itself(dict[str, str]):
    """A mapping in which the value of every key is the key."""

    def get(self, key: str, default: Any = None) -> str:
        return key


def _aligned_comments(lines: Iterable[tuple[str, str | None]]) -> str:
    """Joins lines and their comments, which are aligned in one column. Lines of more than 60 characters do not move the column."""
    lines = list(lines)
    width = max((len(line) for line, _ in lines if len(line) <= 60), default=0)
    return "\n".join(f"{line:{width}}  # {comment}" if comment else line for line, comment in lines)


def _lines(values: Any, key: str, indent: str, origin: dict[str, str]) -> Iterator[tuple[str, str | None]]:
    for name, value in values.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, dict) and value:
            yield f"{indent}{yaml_line(name)}:", None
            yield from _lines(value, path, indent + "  ", origin)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            yield f"{indent}{yaml_line(name)}:", None
            for i, item in enumerate(value):
                first, *rest = _lines(item, f"{path}.{i}", indent + "    ", origin)
                yield f"{indent}  - {first[0].lstrip()}", first[1]
                yield from rest
        else:
            yield f"{indent}{yaml_line(name)}: {yaml_line(value)}", origin.get(path, DEFAULT)
