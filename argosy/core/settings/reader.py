"""Merges layers into a tree of settings in one pass: layers are merged on the way down, and the tree is built on the way up.

Pydantic builds each group after its children, so one pass finds all mistakes at all depths. Rules between the keys of a group are
checked only if each key is valid, because otherwise they would blame the wrong key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from argosy.core.errors import BadInput, UnknownName, UserError
from argosy.core.settings import mistakes
from argosy.core.settings.plain import dotted_key
from argosy.core.settings.repeats import Repeats
from argosy.core.settings.schema import (
    Also,
    BelongsTo,
    Choice,
    FieldShape,
    Settings,
    documented_fields,
    item_hint,
    marks,
    parse_value,
    shape,
    shape_of,
    takes,
)
from argosy.core.settings.words import SELF, SettingsLayer

DEFAULT = "default"

# Marks a value whose mistakes have been recorded.
_FAILED: Any = object()
# Stands among the failed keys of a group if the value of the group is no group.
_WHOLE = ""


@dataclass(frozen=True)
class LayerValue:
    """The value of one key in one layer."""

    layer: SettingsLayer
    value: Any


class SettingsReader:
    """Reads one schema, and collects what it finds.

    problems: all mistakes, except unknown keys.
    unknown: (dotted key, place) of each unknown key.
    known: all dotted keys of the schema.
    also, notes, choices: as in `mistakes.KnownNames`.
    setter: dotted key -> the last layer that set it.
    tried: dotted key -> (origin, value) for each layer that set it.
    good: the top-level settings that have no mistakes, by name.
    """

    def __init__(self):
        self.problems: list[UserError] = []
        self.unknown: list[tuple[str, str]] = []
        self.known: list[str] = []
        self.also: dict[str, list[str]] = {}
        self.notes: dict[str, str] = {}
        self.choices: dict[str, tuple[Choice, str]] = {}
        self.setter: dict[str, SettingsLayer] = {}
        self.tried: dict[str, list[tuple[str, Any]]] = {}
        self.good: dict[str, Any] = {}

    def group(self, cls: type[Settings], key: str, layered: list[LayerValue], tag: str | None = None) -> Any:
        """Reads one group of settings. Returns `_FAILED` if it has mistakes."""
        hint = lambda value: mistakes.in_group(cls, key, value)  # noqa: E731
        layered, all_good = self._mappings(f"`{key}` is a group of settings", key, layered, hint)
        for entry in layered:
            for name in [name for name in entry.value if name not in cls.model_fields and name != tag]:
                self._unknown(dotted_key(key, name), entry, entry.value[name])
        values: dict[str, Any] = {}
        # The names of groups and choices that no layer sets.
        defaults: set[str] = set()
        failed = set() if all_good else {_WHOLE}
        for name, info in cls.model_fields.items():
            path = dotted_key(key, name)
            recent = layered[_since_changed(cls, info, layered) :]
            entries = [LayerValue(entry.layer, entry.value[name]) for entry in recent if name in entry.value]
            self.known.append(path)
            for also, note in ((also, mark.note) for mark in marks(info, Also) for also in mark.names):
                self.also.setdefault(also, []).append(path)
                self.notes.setdefault(also, note)
            if entries or shape_of(info).kind in ("group", "choice"):
                values[name] = self._part(info, path, _default(info) + entries)
                if not entries:
                    defaults.add(name)
            if values.get(name) is _FAILED:
                failed.add(name)
        good = {name: value for name, value in values.items() if name not in failed}
        if not key:
            self.good = good
        built = self._build(cls, key, good, failed)
        if built is not _FAILED:
            built.model_fields_set.difference_update(defaults)
        return built

    def _part(self, info: FieldInfo, key: str, layered: list[LayerValue]) -> Any:
        kind = shape_of(info)
        for mark in marks(info, Repeats):
            if wrong := [problem for entry in layered for problem in mark.misplaced(key, entry.layer)]:
                self.problems += wrong
                return _FAILED
            layered = [LayerValue(*mark.merged(key, entry.layer, entry.value)) for entry in layered]
        return self._leaf(info.annotation, key, layered) if kind.kind == "leaf" else self._read(kind, key, layered)

    def _read(self, kind: FieldShape, key: str, layered: list[LayerValue]) -> Any:
        """Reads a group, choice, list or dict. A None in a layer discards the values of earlier layers."""
        if kind.can_be_none:
            last = max((i for i, entry in enumerate(layered) if entry.value is None), default=-1)
            if last == len(layered) - 1:
                self._set(key, layered)
                return None
            layered = layered[last + 1 :]
        read = {"group": self.group, "choice": self._choice, "list": self._list, "dict": self._dict}[kind.kind]
        return read(kind.of, key, layered)

    def _choice(self, choice: Choice, key: str, layered: list[LayerValue]) -> Any:
        noun, tag = choice.registry.noun, f"{key}.{choice.tag}"
        for entry in layered:
            if isinstance(value := entry.value, Mapping) and {SELF, choice.tag} <= value.keys():
                alone, tag_name = value[SELF], value[choice.tag]
                if isinstance(alone, str) and choice.named(alone).get(choice.tag) != tag_name:
                    problem = f"`{key}` is {alone}, and `{tag}` is {tag_name}"
                    self.problems.append(BadInput(problem, where=f"set by {entry.layer.where(key)}", hint="leave one of both out"))
        layered, all_good = self._mappings(
            f"`{key}` should name the {noun}", key, [_tagged(choice, entry) for entry in layered]
        )
        self.known.append(tag)
        if not all_good:
            return _FAILED
        namers = [LayerValue(entry.layer, entry.value[choice.tag]) for entry in layered if entry.value.get(choice.tag) is not None]
        if not namers:
            self.problems.append(mistakes.unnamed_choice_error(key, choice, layered[-1].layer if layered else None))
            return _FAILED
        self._set(tag, namers)
        try:
            cls = choice.pick(name := namers[-1].value)
        except UnknownName as error:
            layer = namers[-1].layer
            where = f"set by {layer.where(tag if tag in layer.marks else key)}"
            self.problems.append(BadInput(f"{error.what} for `{key}`", where=where, hint=error.hint))
            self._as_nearest(choice, str(namers[-1].value), key, layered)
            return _FAILED
        self.choices[key] = (choice, name)
        return self.group(cls, key, _since_named(layered, choice.tag), choice.tag)

    def _as_nearest(self, choice: Choice, name: str, key: str, layered: list[LayerValue]) -> None:
        """Reads a choice with an unknown name as if it had the nearest name, so that its other mistakes are found too. If no name is
        near, only the keys of the first class become known, so that the hint for `lr` beside `optimizer=sophia` is the learning
        rate."""
        close = get_close_matches(name, choice.registry, n=1)
        nearest = close[0] if close else next(iter(choice.registry))
        self.choices[key] = (choice, nearest)
        before = len(self.problems)
        entries = _since_named(layered, choice.tag) if close else []
        self.group(choice.pick(nearest), key, entries, choice.tag)
        # In a group whose name is not known, no key is reported as missing.
        self.problems[before:] = [p for p in self.problems[before:] if close and p.where != mistakes.NOBODY]

    def _list(self, item: Any, key: str, layered: list[LayerValue]) -> Any:
        layer, value = layered[-1].layer, layered[-1].value
        if not isinstance(value, list | tuple):
            self.problems.append(mistakes.not_that(f"`{key}` is a list", value, layer, key))
            return _FAILED
        self._set(key, layered)
        items = [self._read(shape(item), f"{key}.{i}", [LayerValue(layer, part)]) for i, part in enumerate(value)]
        return _FAILED if any(part is _FAILED for part in items) else items

    def _dict(self, item: Any, key: str, layered: list[LayerValue]) -> Any:
        layered, all_good = self._mappings(f"`{key}` is a mapping", key, layered)
        values: dict[str, Any] = {}
        for name in dict.fromkeys(name for entry in layered for name in entry.value):
            entries = [LayerValue(entry.layer, entry.value[name]) for entry in layered if name in entry.value]
            values[name] = self._read(shape(item), dotted_key(key, name), entries)
        return values if all_good and all(value is not _FAILED for value in values.values()) else _FAILED

    def _leaf(self, hint: Any, key: str, layered: list[LayerValue]) -> Any:
        """Reads a leaf by its type. The last layer overrides the others, but mappings are merged. In a mapping whose values cannot be
        None, None removes a name."""
        can_be_mapping = takes(hint, {})
        entries = []
        for entry in layered:
            if isinstance(entry.value, Mapping) and not can_be_mapping:
                for name in [name for name in entry.value if name != SELF]:
                    self._unknown(dotted_key(key, name), entry, entry.value[name])
                entries += [LayerValue(entry.layer, entry.value[SELF])] if SELF in entry.value else []
            else:
                entries.append(entry)
        if not entries:
            return _FAILED
        self._set(key, entries)
        merged: Any = None
        for entry in entries:
            value = parse_value(hint, entry.value, entry.layer.text, key)
            merged = self._merged(hint, key, merged, LayerValue(entry.layer, value))
        return merged

    def _merged(self, hint: Any, key: str, old: Any, new: LayerValue) -> Any:
        if not isinstance(new.value, Mapping):
            return new.value
        merged = dict(old) if isinstance(old, Mapping) else {}
        for name, value in new.value.items():
            path, item = dotted_key(key, name), item_hint(hint)
            if value is None and not takes(item, None):
                merged.pop(name, None)
                continue
            self._set(path, [LayerValue(new.layer, value)], added=True)
            merged[name] = self._merged(item, path, merged.get(name), LayerValue(new.layer, value))
        return merged

    def _build(self, cls: type[Settings], key: str, values: dict[str, Any], failed: set[str]) -> Any:
        try:
            built = cls.model_validate(values)
            return _FAILED if failed else built
        except ValidationError as error:
            errors = error.errors()
        # A validator of ours has raised this, with its own message.
        except UserError as error:
            if not failed:
                self.problems.append(mistakes.broken_rule(key, self._leaves(), error.what, self.setter.get, error.hint))
            return _FAILED
        wrong = [e for e in errors if e["loc"] and e["loc"][0] not in failed]
        # In a group whose value is no group, no key is reported as missing.
        if _WHOLE in failed:
            wrong = [e for e in wrong if e["type"] != "missing"]
        for name in dict.fromkeys(str(e["loc"][0]) for e in wrong):
            field_errors = [e for e in wrong if e["loc"][0] == name]
            self.problems += mistakes.wrong(dotted_key(key, name), documented_fields(cls)[name], field_errors, self.setter.get)
        if not (failed or wrong):
            leaves = self._leaves()
            broken = [problem for e in errors for problem in mistakes.messages(e)]
            self.problems += [mistakes.broken_rule(key, leaves, problem, self.setter.get) for problem in broken]
        return _FAILED

    def _leaves(self) -> list[str]:
        groups = {path.rpartition(".")[0] for path in self.known}
        return [path for path in self.known if path not in groups]

    def _mappings(
        self, problem: str, key: str, layered: list[LayerValue], hint: Callable[[Any], str | None] = lambda value: None
    ) -> tuple[list[LayerValue], bool]:
        """The entries of `layered` that are mappings, and whether all are. The others are recorded as mistakes."""
        good: list[LayerValue] = []
        all_good = True
        for entry in layered:
            value = _explicit(entry.value) if isinstance(entry.value, Settings) else entry.value
            if value is None and entry.layer.text(key) == "":
                # This is a heading in a file with nothing under it.
                continue
            if isinstance(value, Mapping) and SELF not in value:
                good.append(LayerValue(entry.layer, value))
            else:
                all_good = False
                self.problems.append(mistakes.not_that(problem, value, entry.layer, key, hint(value)))
        return good, all_good

    def _unknown(self, key: str, entry: LayerValue, value: Any) -> None:
        """Records an unknown key. For an unknown group with a single leaf, the leaf is recorded."""
        while isinstance(value, Mapping) and len(value) == 1:
            name, value = next(iter(value.items()))
            key = dotted_key(key, name)
        self.unknown.append((key, f"set by {entry.layer.where(key)}"))

    def _set(self, key: str, layered: list[LayerValue], added: bool = False) -> None:
        before = self.tried.get(key, []) if added else []
        self.tried[key] = before + [(entry.layer.origin, entry.value) for entry in layered]
        if layered and layered[-1].layer.origin != DEFAULT:
            self.setter[key] = layered[-1].layer


def _default(info: FieldInfo) -> list[LayerValue]:
    if info.is_required():
        return []
    return [LayerValue(SettingsLayer(DEFAULT, {}), info.get_default(call_default_factory=True))]


def _tagged(choice: Choice, entry: LayerValue) -> LayerValue:
    """Expands the shorthand of a choice: a name alone, or beside keys, becomes the tag. If a choice has the name `none`, None becomes
    this name."""
    value = entry.value
    if "none" in choice.registry:
        absent = next((key for key in (SELF, choice.tag) if isinstance(value, Mapping) and value.get(key, "") is None), None)
        value = "none" if value is None else {**value, absent: "none"} if absent is not None else value
    if isinstance(value, Settings):
        return LayerValue(entry.layer, {choice.tag: choice.name_of(value), **_explicit(value)})
    if isinstance(value, str):
        return LayerValue(entry.layer, choice.named(value))
    if isinstance(value, Mapping) and isinstance(value.get(SELF), str):
        return LayerValue(entry.layer, choice.named(value[SELF]) | {k: v for k, v in value.items() if k != SELF})
    return LayerValue(entry.layer, value)


def _since_named(layered: list[LayerValue], tag: str) -> list[LayerValue]:
    """The entries from the layer on that last changed the tag."""
    name, entries = None, []
    for entry in layered:
        tag_name = entry.value.get(tag)
        if tag_name is not None and tag_name != name:
            entries = entries if name is None else []
            name = tag_name
        entries.append(entry)
    return entries


def _since_changed(cls: type[Settings], info: FieldInfo, layered: list[LayerValue]) -> int:
    """The index of the first layer that counts for a key: the last layer that changed the key that this key `BelongsTo`; 0 without such
    a key."""
    first = 0
    for mark in marks(info, BelongsTo):
        value = cls.model_fields[mark.key].get_default(call_default_factory=True)
        for number, entry in enumerate(layered):
            if entry.value.get(mark.key, value) != value:
                value, first = entry.value[mark.key], max(first, number)
    return first


def _explicit(group: Settings) -> dict[str, Any]:
    """The keys that were explicitly set in a built group, with their values."""
    return {name: getattr(group, name) for name in type(group).model_fields if name in group.model_fields_set}
