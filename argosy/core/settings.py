"""Layered, typed, typo-proof settings: YAML files, then `key=value` words, to one frozen tree that knows who set each key.

    reading = read_settings(Run, yaml_layer("base.yml"), yaml_layer("tiny.yml"), words_layer(["optimizer=muon"]))
    reading.value.optimizer.ns_steps       reading.origin["optimizer.name"] == "command line"

Layers apply in order; groups and mappings merge key by key, everything else is replaced whole. A layer that changes the tag of
a `Choice` drops what older layers said of it: a learning rate meant for AdamW is wrong for Muon. Every mistake is found before
any is told: groups are built bottom-up, each by Pydantic, and a parent's rules are asked only once its children stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from argosy.core import mistakes
from argosy.core.errors import SettingsError, UnknownName, UserError
from argosy.core.schema import Choice, Settings, Shape, meant, shape, shape_of, takes
from argosy.core.words import COMMAND_LINE, SELF, Layer, Mark, words_layer, yaml_layer

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Choice",
    "Layer",
    "Mark",
    "Reading",
    "Settings",
    "diff",
    "dump",
    "flatten",
    "read_settings",
    "words_layer",
    "yaml_layer",
]

T = TypeVar("T", bound=Settings)

DEFAULT = "default"
_FAILED: Any = object()
_NO_GROUP = ""  # stands among the failed keys for a group that was given as something else


@dataclass(frozen=True)
class Reading(Generic[T]):
    """A typed tree, and for each of its dotted leaf keys who set it and what every layer said, oldest first."""

    value: T
    origin: dict[str, str]
    tried: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


def read_settings(schema: type[T], *layers: Layer) -> Reading[T]:
    """The typed tree that the layers describe, later ones winning.

    Raises:
        SettingsError: every mistake of every layer at once.
    """
    reader = _Reader()
    value = reader.group(schema, "", [_Said(layer, layer.values) for layer in layers])
    problems = reader.problems + [mistakes.unknown(key, where, reader.known, reader.choices) for key, where in reader.unknown]
    if problems:
        raise SettingsError(problems)
    origin = {key: reader.setter[key].origin if key in reader.setter else DEFAULT for key in flatten(value)}
    return Reading(value, origin, reader.tried)


@dataclass(frozen=True)
class _Said:
    """What one layer says of one key."""

    layer: Layer
    value: Any


class _Reader:
    """One pass over a schema: merges what the layers say, top-down, and builds the tree, bottom-up."""

    def __init__(self):
        self.problems: list[UserError] = []
        self.unknown: list[tuple[str, str]] = []
        self.known: list[str] = []
        self.choices: dict[str, tuple[Choice, str]] = {}
        self.setter: dict[str, Layer] = {}
        self.tried: dict[str, list[tuple[str, Any]]] = {}

    def read(self, kind: Shape, key: str, said: list[_Said]) -> Any:
        """The value at a key that has parts; none among what was said wipes out what was said before."""
        if kind.can_be_none:
            said = [*said] or [_Said(Layer(DEFAULT, {}), None)]
            last_none = max((i for i, one in enumerate(said) if one.value is None), default=-1)
            if last_none == len(said) - 1:
                self._set(key, said)
                return None
            said = said[last_none + 1 :]
        if kind.kind == "group":
            return self.group(kind.of, key, said)
        if kind.kind == "choice":
            return self._choice(kind.of, key, said)
        return self._list(kind, key, said) if kind.kind == "list" else self._dict(kind, key, said)

    def group(self, cls: type[Settings], key: str, said: list[_Said], tag: str | None = None) -> Any:
        """One group of settings, or _FAILED once its mistakes are noted."""
        said, good = self._mappings(f"`{key}` is a group of settings", key, said)
        fields = cls.model_fields
        for one in said:
            for name in one.value:
                if name not in fields and name != tag:
                    self._unknown(_dotted(key, name), one, one.value[name])
        values: dict[str, Any] = {}
        failed = set() if good else {_NO_GROUP}
        for name, info in fields.items():
            path, kind = _dotted(key, name), shape_of(info)
            its = [_Said(one.layer, one.value[name]) for one in said if name in one.value]
            self.known.append(path)
            if kind.kind == "leaf":
                value = self._leaf(info.annotation, path, its)
            else:
                value = self.read(kind, path, [*_default(info), *its])
            if value is _FAILED:
                failed.add(name)
            elif its or kind.kind != "leaf":
                values[name] = value
        return self._build(cls, key, values, failed)

    def _choice(self, choice: Choice, key: str, said: list[_Said]) -> Any:
        said, good = self._mappings(f"`{key}` is a {choice.registry.noun}", key, [_tagged(choice, one) for one in said])
        tag, name, kept = f"{key}.{choice.tag}", None, []
        for one in said:
            named = one.value.get(choice.tag, name)
            if named != name and name is not None:
                kept = []
            name, kept = named, [*kept, one]
        self.known.append(tag)
        if not good:
            return _FAILED
        if name is None:
            where = f"set by {said[-1].layer.where(key)}" if said else "set by nobody"
            self.problems.append(mistakes.unnamed(key, choice, where))
            return _FAILED
        namers = [_Said(one.layer, one.value[choice.tag]) for one in said if choice.tag in one.value]
        self._set(tag, namers)
        try:
            cls = choice.pick(name)
        except UnknownName as error:
            where = namers[-1].layer.where(tag if tag in namers[-1].layer.marks else key)
            self.problems.append(UserError(f"{error.what} for `{key}`", where=f"set by {where}", hint=error.hint))
            return _FAILED
        self.choices[key] = (choice, name)
        return self.group(cls, key, kept, choice.tag)

    def _list(self, kind: Shape, key: str, said: list[_Said]) -> Any:
        if not said:
            return []
        layer, value = said[-1].layer, said[-1].value
        if not isinstance(value, list | tuple):
            self.problems.append(mistakes.not_that(f"`{key}` is a list", value, f"set by {layer.where(key)}"))
            return _FAILED
        self._set(key, said)
        items = [self.read(shape(kind.of), f"{key}.{i}", [_Said(layer, item)]) for i, item in enumerate(value)]
        return _FAILED if any(item is _FAILED for item in items) else items

    def _dict(self, kind: Shape, key: str, said: list[_Said]) -> Any:
        said, good = self._mappings(f"`{key}` is a mapping", key, said)
        names = dict.fromkeys(name for one in said for name in one.value)
        values = {}
        for name in names:
            its = [_Said(one.layer, one.value[name]) for one in said if name in one.value]
            values[name] = self.read(shape(kind.of), _dotted(key, name), its)
        return values if good and not any(value is _FAILED for value in values.values()) else _FAILED

    def _leaf(self, hint: Any, key: str, said: list[_Said]) -> Any:
        """The last word on a key, read by its type; mappings merge."""
        if not said:
            return None
        for one in said:
            if isinstance(one.value, Mapping) and not takes(hint, {}):
                for name in one.value.keys() - {SELF}:
                    self._unknown(_dotted(key, name), one, one.value[name])
        said = [_Said(one.layer, _own(one.value, hint)) for one in said if _own(one.value, hint) is not _FAILED]
        if not said:
            return _FAILED
        last = said[-1]
        self._set(key, said)
        try:
            if not isinstance(last.value, Mapping):
                return meant(hint, last.value, last.layer.text, key)
            merged: dict[str, Any] = {}
            for one in said:
                if isinstance(one.value, Mapping):
                    merged |= meant(hint, one.value, one.layer.text, key)
                    self._set_each(key, one)
            return merged
        except PydanticKnownError as error:
            where = f"set by {last.layer.where(key)}"
            self.problems.append(mistakes.wrong_type(key, hint, last.layer.text(key) or last.value, error.type, where))
            return _FAILED

    def _build(self, cls: type[Settings], key: str, values: dict[str, Any], failed: set[str]) -> Any:
        try:
            built = cls.model_validate(values)
            return _FAILED if failed else built
        except ValidationError as error:
            errors = [e for e in error.errors() if e["loc"] and e["loc"][0] not in failed]
            errors = [e for e in errors if e["type"] != "missing" or _NO_GROUP not in failed]
            rules = [e for e in error.errors() if not e["loc"]] if not (failed or errors) else []
            for name in dict.fromkeys(e["loc"][0] for e in errors):
                its = [e for e in errors if e["loc"][0] == name]
                info = cls.model_fields[str(name)]
                self.problems += mistakes.wrong(_dotted(key, str(name)), info, its, self._where)
            for e in rules:
                self.problems.append(mistakes.broken_rule(key, cls, e, self._origin))
        except UserError as error:
            if not failed:
                self.problems.append(UserError(f"`{key}`: {error.what}", where=error.where, hint=error.hint))
        return _FAILED

    def _mappings(self, what: str, key: str, said: list[_Said]) -> tuple[list[_Said], bool]:
        """Those of `said` that are mappings, and whether all are; the others are mistakes."""
        plain = [_Said(one.layer, _as_mapping(one.value)) for one in said]
        good = [one for one in plain if isinstance(one.value, Mapping) and SELF not in one.value]
        for one in plain:
            if one not in good:
                value = one.value[SELF] if isinstance(one.value, Mapping) else one.value
                self.problems.append(mistakes.not_that(what, value, f"set by {one.layer.where(key)}"))
        return good, len(good) == len(plain)

    def _unknown(self, key: str, one: _Said, value: Any) -> None:
        """Notes an unknown key; of an unknown group with one leaf, the leaf."""
        while isinstance(value, Mapping) and len(value) == 1:
            name, value = next(iter(value.items()))
            key = _dotted(key, name)
        self.unknown.append((key, f"set by {one.layer.where(key)}"))

    def _set(self, key: str, said: list[_Said]) -> None:
        self.tried[key] = [(one.layer.origin, one.value) for one in said]
        if said and said[-1].layer.origin != DEFAULT:
            self.setter[key] = said[-1].layer

    def _set_each(self, key: str, one: _Said) -> None:
        for name, value in one.value.items():
            path = _dotted(key, name)
            self.tried.setdefault(path, []).append((one.layer.origin, value))
            self.setter[path] = one.layer
            if isinstance(value, Mapping):
                self._set_each(path, _Said(one.layer, value))

    def _where(self, key: str) -> str:
        layer = self.setter.get(key) or self.setter.get(key.rpartition(".")[0])
        return f"set by {layer.where(key)}" if layer else f"set by {DEFAULT}"

    def _origin(self, key: str) -> str | None:
        return self.setter[key].origin if key in self.setter else None


def _default(info: FieldInfo) -> list[_Said]:
    if info.is_required():
        return []
    return [_Said(Layer(DEFAULT, {}), info.get_default(call_default_factory=True))]


def _tagged(choice: Choice, one: _Said) -> _Said:
    """A choice's shorthand written out: a name alone, or a name beside keys, is the tag."""
    value = one.value
    if isinstance(value, Settings):
        return _Said(one.layer, {choice.tag: choice.name_of(value), **_as_mapping(value)})
    if isinstance(value, str):
        return _Said(one.layer, {choice.tag: value})
    if isinstance(value, Mapping) and isinstance(value.get(SELF), str):
        return _Said(one.layer, {choice.tag: value[SELF]} | {k: v for k, v in value.items() if k != SELF})
    return one


def _as_mapping(value: Any) -> Any:
    """A built group as the keys that were given to it."""
    return {name: getattr(value, name) for name in value.model_fields_set} if isinstance(value, Settings) else value


def _own(value: Any, hint: Any) -> Any:
    if not isinstance(value, Mapping) or takes(hint, {}):
        return value
    return value.get(SELF, _FAILED)


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


# ---- a tree as plain values


def dump(tree: Settings) -> dict[str, Any]:
    """The tree as plain YAML values, tags included; reading them gives an equal tree."""
    return {name: _plain(shape_of(info), getattr(tree, name)) for name, info in type(tree).model_fields.items()}


def _plain(kind: Shape, value: Any) -> Any:
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
    """Dotted key -> leaf. Mappings and lists of groups are taken apart; other lists, and empty mappings, are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in (dump(tree) if isinstance(tree, Settings) else tree).items():
        key = _dotted(prefix, name)
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        leaves |= flatten(value, key) if isinstance(value, Mapping) and value else {key: value}
    return leaves


def diff(a: Settings | Mapping[str, Any], b: Settings | Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys on which two trees differ, with both values; None stands for a key that one of them does not have."""
    left, right = flatten(a), flatten(b)
    keys = dict.fromkeys([*left, *right])
    same = {key for key in left.keys() & right.keys() if left[key] == right[key]}
    return [(key, left.get(key), right.get(key)) for key in keys if key not in same]
