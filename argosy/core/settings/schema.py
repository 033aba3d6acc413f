"""The types of settings: `Settings`, a frozen group of typed keys, and `Choice`, a group whose class is selected by a name.

    class AdamW(Settings):
        learning_rate: float = Field(1e-3, gt=0)
        "Peak learning rate."                                  # the documentation of the key

    class Run(Settings):
        optimizer: Annotated[Any, Choice(OPTIMIZERS)] = "adamw"

`parse_value` reads a value by the type of its key, so numbers may be written as people write them. Nothing else is guessed: a bool is
never a number, and a number is never a bool. This module does not know layers, which `core.settings` merges.
"""

import ast
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, dataclass_transform, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from argosy.core.errors import BadInput, UnknownName
from argosy.core.registry import Registry, is_file
from argosy.core.settings.scalars import parse_number, scalar


def _no_text(key: str) -> str | None:
    return None


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    class _Keys(ModelMetaclass):
        """Lets type checkers see the default in `Field(8, ge=1)`. With Pydantic's own transform, they only see it in `default=8`."""

else:
    _Keys = type(BaseModel)


class BrokenRules(ValueError):
    """Raised by the validator of a group, with all broken rules between its keys. Each rule is reported as a separate mistake."""

    def __init__(self, rules: Iterable[str]):
        self.rules = list(rules)
        super().__init__("; ".join(self.rules))


class Settings(BaseModel, metaclass=_Keys):
    """A frozen group of settings. The string under a field documents it (`documented_fields`). Unknown keys are errors. So are infinite
    and NaN values, because a learning rate of infinity is a typo."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    # Names from other trainers that correspond to no key, each with a sentence for the hint. Only that of the root class is used.
    elsewhere: ClassVar[Mapping[str, str]] = {}
    # The command that lists all keys, for hints that do not list all. Only that of the root class is used.
    all_keys: ClassVar[str] = "`--help`"

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        return parse_value(cls.model_fields[info.field_name or ""].annotation, value)


class Also:
    """Marks a key with the names that other trainers use for it: `Annotated[float, Also("lr", "max_lr")]`. These names are not
    accepted, but the error names the right key. A dotted name, `training.steps`, takes precedence over its last part.

    note: how the value differs from that of these names, for example in its unit. It follows the key in the error."""

    def __init__(self, *names: str, note: str = ""):
        self.names, self.note = names, note


class MayChange:
    """Marks a key or a whole group that may change when a run resumes: `every: Annotated[int, MayChange()] = 100`. No other key may
    change, because it would then be another run."""


class BelongsTo:
    """Marks a key that describes the value of another key of its group: `max_bytes: Annotated[int, BelongsTo("source")]`. A layer that
    changes the other key discards the values of this key in earlier layers, just as a new tag discards the keys of the old choice."""

    def __init__(self, key: str):
        self.key = key


_DOCUMENTED: list[type[Settings]] = []


def documented_fields(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a class of settings, with the strings under them as descriptions.

    The strings are read from the source file here, and not when a class is created, because only help, references and errors show them.
    Pydantic would read them for each class, which takes 70 ms for all settings of a run.
    """
    if cls in _DOCUMENTED:
        return cls.model_fields
    _DOCUMENTED.append(cls)
    for base in reversed(cls.__mro__):
        path = getattr(sys.modules.get(base.__module__), "__file__", None)
        if not issubclass(base, Settings) or path is None:
            continue
        for name, text in _documentation(path).get(base.__qualname__.replace("<locals>.", ""), {}).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text
    return cls.model_fields


@cache
def _documentation(path: str) -> dict[str, dict[str, str]]:
    """Reads the documentation in one source file: qualified name of a class -> name of a field -> the string under it."""
    documentation: dict[str, dict[str, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                documentation[prefix + node.name] = dict(_documented_names(node.body))
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                visit(node.body, f"{prefix}{node.name}.")

    try:
        with open(path, encoding="utf-8") as file:
            visit(ast.parse(file.read()).body, "")
    except (OSError, SyntaxError, ValueError):
        # The module is compiled, or in an archive.
        return {}
    return documentation


def _documented_names(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield field.target.id, cleandoc(text.value.value)


def marks(field: FieldInfo, kind: type) -> list[Any]:
    """The marks of this class in the annotation of a field, such as `Also`."""
    return [mark for mark in field.metadata if isinstance(mark, kind)]


@dataclass(frozen=True, eq=False)
class Choice:
    """Marks a key whose value is a group. A tag in the group names its class: `Annotated[Any, Choice(OPTIMIZERS)]`.

    The value is written `{name: muon, ns_steps: 6}`, or only `muon`. The registered class, a `Settings`, is imported on first use.

    registry: the classes by name.
    tag: the key in the group that holds the name.
    other: (name, key). A text with a colon, such as FILE.py:CLASS, stands for the class with this name, and is the value of this key.
    """

    registry: Registry
    tag: str = "name"
    other: tuple[str, str] | None = None

    def named(self, text: str) -> dict[str, Any]:
        """The mapping for which a text alone stands."""
        if self.other is not None and ":" in text:
            return {self.tag: self.other[0], self.other[1]: text}
        return {self.tag: text}

    def name_of(self, value: Settings) -> str:
        """The first name under which the class of the value is registered. Imports nothing.

        Raises:
            ValueError: the class is not registered.
        """
        cls = type(value)
        for name, item in self.registry._items.items():
            if item is cls or item == f"{cls.__module__}:{cls.__qualname__}":
                return name
        raise ValueError(f"{cls.__name__} is no registered {self.registry.noun}")

    def pick(self, name: Any) -> type[Settings]:
        """The class that is registered under a name.

        Raises:
            UnknownName: there is no such class.
            BadInput: FILE.py:NAME is no class of settings.
            TypeError: another registered name is no class of settings.
        """
        if not isinstance(name, str):
            raise UnknownName(self.registry.noun, str(name), self.registry)
        cls = self.registry[name]
        if not (isinstance(cls, type) and issubclass(cls, Settings)):
            if is_file(name):
                raise BadInput(f"the {self.registry.noun} `{name}` is no class of settings", hint="it derives from one of ours")
            raise TypeError(f"{self.registry.noun} `{name}` is {cls!r}, not a Settings class")
        return cls

    def build(self, value: Any) -> Settings:
        """Builds the group from a name or a mapping with the tag. A group that is already built is returned unchanged."""
        if isinstance(value, Settings):
            self.name_of(value)
            return value
        value = self.named(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or self.tag not in value:
            raise ValueError(f"should be a {self.registry.noun}: a name, or a mapping with `{self.tag}`")
        try:
            cls = self.pick(value[self.tag])
        except UnknownName as error:
            raise ValueError(f"{error.what}; {error.hint}") from None
        return cls(**{key: item for key, item in value.items() if key != self.tag})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.build)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        options: list[dict[str, Any]] = []
        every: dict[str, list[Any]] = {}
        for name in self.registry:
            reference = handler(self.pick(name).__pydantic_core_schema__)
            group = dict(handler.resolve_ref_schema(reference))
            for key, item in group.get("properties", {}).items():
                if item not in every.setdefault(key, []):
                    every[key].append(item)
            group["properties"] = {self.tag: {"const": name}, **group.get("properties", {})}
            group["required"] = [self.tag, *group.get("required", [])]
            options.append(group)
        # Another layer may have made the choice, so keys of any class are accepted without the tag.
        keys: dict[str, Any] = {key: items[0] if len(items) == 1 else {"anyOf": items} for key, items in every.items()}
        untagged = {"type": "object", "properties": {self.tag: False, **keys}, "additionalProperties": False}
        others = [] if self.other is None else [{"type": "string", "pattern": ":"}]
        return {"oneOf": [{"enum": list(self.registry)}, *others, untagged, *options]}


# ---- questions about a type


@dataclass(frozen=True)
class FieldShape:
    """The way in which a key is read: as one leaf, or part by part.

    kind: the kind of the value.
    of: the class of a group, the `Choice`, the type of the items, or the type of a leaf.
    can_be_none: whether None is a valid value.
    """

    kind: Literal["leaf", "group", "choice", "list", "dict"]
    of: Any = None
    can_be_none: bool = False


# The shapes of fields, by the id of the field, because a field cannot be hashed. It is a cache: 84 presets have 5,000 fields of 200
# kinds.
_SHAPES: dict[int, tuple[FieldInfo, FieldShape]] = {}


def shape_of(info: FieldInfo) -> FieldShape:
    """The way in which a field is read. If its default is None, None is a valid value."""
    cached = _SHAPES.get(id(info))
    if cached is None:
        cached = _SHAPES[id(info)] = info, _shape_of(info)
    return cached[1]


def _shape_of(info: FieldInfo) -> FieldShape:
    choice = next((mark for mark in info.metadata if isinstance(mark, Choice)), None)
    # Pydantic keeps the annotation and the choice apart.
    field_shape = shape(Annotated[info.annotation, choice] if choice else info.annotation)
    return replace(field_shape, can_be_none=field_shape.can_be_none or info.default is None)


def shape(hint: Any) -> FieldShape:
    """The way in which a value of this type is read."""
    can_be_none = hint is None or type(None) in members(hint)
    choice = next((mark for mark in get_args(hint)[1:] if isinstance(mark, Choice)), None)
    if get_origin(hint) is Annotated:
        inner = shape(get_args(hint)[0])
        return FieldShape("choice", choice, inner.can_be_none) if choice else inner
    options = [member for member in members(hint) if member is not type(None)]
    if len(options) == 1 and options[0] is not hint:
        inner = shape(options[0])
        return FieldShape(inner.kind, inner.of, can_be_none or inner.can_be_none)
    if isinstance(hint, type) and issubclass(hint, Settings):
        return FieldShape("group", hint)
    args = get_args(hint)
    if get_origin(hint) in (list, tuple) and args and shape(args[0]).kind != "leaf":
        return FieldShape("list", args[0], can_be_none)
    if get_origin(hint) is dict and shape(args[1]).kind != "leaf":
        return FieldShape("dict", args[1], can_be_none)
    return FieldShape("leaf", hint, can_be_none)


def members(hint: Any) -> tuple[Any, ...]:
    """The member types of a union. For another type, the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def item_hint(hint: Any) -> Any:
    """The type of a mapping's values; Any if it is not declared."""
    for member in members(hint):
        if get_origin(member) in (dict, Mapping):
            return get_args(member)[1]
    return Any


def takes(hint: Any, value: Any) -> bool:
    """Whether a value has this type. Items inside of it are not checked."""
    if get_origin(hint) is Annotated:
        return takes(get_args(hint)[0], value)
    if len(members(hint)) > 1:
        return any(takes(member, value) for member in members(hint))
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    bare = get_origin(hint) or hint
    kind = {float: (int, float), tuple: (list, tuple), list: (list, tuple)}.get(bare, bare)
    # True is an int to Python.
    return isinstance(value, kind) and (not isinstance(value, bool) or kind is bool)


# ---- values, read by their type


@dataclass(frozen=True)
class RefusedValue:
    """Wraps a value that Pydantic would accept, although it is certainly a mistake: a number for a bool, a bool for a number, or an
    integer too large for any array."""

    value: Any


def parse_value(hint: Any, value: Any, text_of: Callable[[str], str | None] = _no_text, key: str = "") -> Any:
    """Interprets a written value by the type of its key. A value that does not fit is returned unchanged or as a `RefusedValue`, and
    Pydantic then refuses it.

    Args:
        hint: the type.
        value: the value that a YAML reader returned.
        text_of: dotted key -> the text of a plain scalar as it was written, such as `no` for False or `007` for 7; None: it is no plain
            scalar.
        key: the dotted key of the value.
    """
    if get_origin(hint) is Annotated:
        return parse_value(get_args(hint)[0], value, text_of, key)
    if len(members(hint)) > 1:
        return _meant_by_one(members(hint), value, text_of, key)
    if isinstance(value, list | tuple):
        return _items(hint, value, text_of, key)
    if isinstance(value, Mapping):
        return {name: parse_value(item_hint(hint), item, text_of, f"{key}.{name}") for name, item in value.items()}
    text = text_of(key)
    text = value if text is None else text
    if hint is bool:
        return _switch(value)
    if hint in (int, float):
        return _number(hint, value)
    if get_origin(hint) is Literal:
        return text if takes(hint, text) else value
    if hint is Path and isinstance(text, str):
        return Path(text)
    return text if hint is str else value


def _meant_by_one(options: tuple[Any, ...], value: Any, text_of: Callable[[str], str | None], key: str) -> Any:
    """Interprets a value by the first member of a union that accepts it unchanged, or else by the first that can interpret it."""
    for option in options:
        if takes(option, value):
            return parse_value(option, value, text_of, key)
    if isinstance(value, str) and type(None) in options and scalar(value) is None:
        return None
    readings = [parse_value(option, value, text_of, key) for option in options]
    good = (reading for option, reading in zip(options, readings) if takes(option, reading))
    return next(good, next((reading for reading in readings if isinstance(reading, RefusedValue)), value))


def _items(hint: Any, value: list | tuple, text_of: Callable[[str], str | None], key: str) -> Any:
    args = [arg for arg in get_args(hint) if arg is not Ellipsis] if get_origin(hint) in (list, tuple) else []
    hints = args if len(args) == len(value) else (args[:1] or [Any]) * len(value)
    return type(value)(parse_value(h, item, text_of, f"{key}.{i}") for i, (h, item) in enumerate(zip(hints, value)))


def _switch(value: Any) -> Any:
    meaning = scalar(value) if isinstance(value, str) else value
    return meaning if isinstance(meaning, bool) else RefusedValue(value)


def _number(hint: type, value: Any) -> Any:
    if isinstance(value, bool):
        return RefusedValue(value)
    number = parse_number(value) if isinstance(value, str) else None
    value = value if number is None or (hint is int and isinstance(number, float)) else number
    return RefusedValue(value) if hint is int and isinstance(value, int) and abs(value) >= 2**63 else value
