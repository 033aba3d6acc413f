"""Makes the messages for mistakes in settings: what is wrong with which key, which layer set it, and how to fix it.

The hint for an unknown key names a key that this run could have: the key for which another trainer uses that name, a key of another
class of a choice (`b1` belongs to `name: adamw`), the most similar key, or the same name in another group.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from argosy.core.errors import BadInput, UserError, nearest, some
from argosy.core.settings.plain import dotted_key
from argosy.core.settings.scalars import yaml_line
from argosy.core.settings.schema import Also, Choice, RefusedValue, Settings, marks, members
from argosy.core.settings.words import SELF, SettingsLayer

Setter = Callable[[str], SettingsLayer | None]

NOBODY = "set nowhere"

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a mapping",
    "path": "a path",
    "none": "none",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
_HINTS = {
    "int": "whole numbers may be written 1000, 4_096, 1e5, 25k, 4M, 1.5B",
    "float": "numbers may be written 0.1, 3e-4, 1_000, 25k",
    "bool": "write true or false, on or off, yes or no",
    "list": "write a list as [1, 2, 3]",
    "dict": "write a mapping as {name: value}",
}


@dataclass(frozen=True)
class KnownNames:
    """The names from which hints for unknown keys are made.

    known: all dotted keys of this run.
    choices: dotted key -> the choice at that key, and the chosen name.
    also: name that other trainers use -> our keys.
    notes: name that other trainers use -> how its value differs from ours; empty if it does not.
    elsewhere: name that corresponds to no key -> a sentence about it.
    all_keys: the command that lists all keys.
    """

    known: Sequence[str] = ()
    choices: Mapping[str, tuple[Choice, str]] = field(default_factory=dict)
    also: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    all_keys: str = "`--help`"


def unknown_key(key: str, where: str | None, names: KnownNames) -> UserError:
    """The error for a key that does not exist."""
    return BadInput(f"unknown setting `{key}`", where=where, hint=_nearest_key(key, names))


def _nearest_key(key: str, names: KnownNames) -> str:
    keys, choices = sorted(set(names.known)), names.choices
    group, _, leaf = key.rpartition(".")
    if key in keys:
        return f"in a file, write `{leaf}` under `{group}`, without the dot"
    if group in keys and not any(other.startswith(f"{group}.") for other in keys):
        return names.elsewhere.get(key) or f"`{group}` is one value, without keys of its own"
    if answer := _of_other_trainers(key, names):
        return answer
    if owner := _other_owner(group, leaf, choices):
        return owner
    likest = max(keys, key=lambda other: _likeness(key, other), default="")
    if _likeness(key, likest) > 0:
        return f"did you mean `{likest}`?"
    if same := [other for other in keys if other.rpartition(".")[2] == leaf]:
        return f"did you mean `{same[0]}`?"
    leaves = {other.rpartition(".")[2]: other for other in reversed(keys)}
    if close := get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return f"did you mean `{leaves[close[0]]}`?"
    foreign = [*names.also, *names.elsewhere]
    if (close := get_close_matches(key.lower().replace("-", "_"), foreign, n=1, cutoff=0.85)) and (
        answer := _of_other_trainers(close[0], names)
    ):
        return answer if answer.startswith("did you mean") else f"`{close[0]}`: {answer}"
    siblings = [other.rpartition(".")[2] for other in keys if other.rpartition(".")[0] == group]
    return nearest(leaf, siblings, all_names=names.all_keys) or f"{names.all_keys} lists every setting"


def _of_other_trainers(key: str, names: KnownNames) -> str | None:
    """A hint for a name that another trainer uses; None if no trainer uses it. A match of the whole dotted name takes precedence over
    matches of its end (as for verl's `actor_rollout_ref.rollout.n`), and longer ends over shorter ones. Of several keys, one in the
    same group is preferred."""
    plain = key.lower().replace("-", "_")
    group, _, leaf = plain.rpartition(".")
    parts = plain.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    for name in ends:
        if ours := names.also.get(name):
            suggestion = f"did you mean `{next((k for k in ours if k.rpartition('.')[0] == group), ours[0])}`?"
            return f"{suggestion} {note}" if (note := names.notes.get(name)) else suggestion
        if sentence := names.elsewhere.get(name):
            return sentence
        if name in names.known and "." in name:
            return f"did you mean `{name}`?"
    # A key of the chosen class takes precedence over a key of another class.
    if not group and len(same := [key for key in names.known if key.rpartition(".")[2] == leaf and "." in key]) == 1:
        return f"did you mean `{same[0]}`?"
    return next(filter(None, (_of_another_choice(name, names) for name in ends)), None)


def _of_another_choice(name: str, names: KnownNames) -> str | None:
    """A hint for a name that other trainers use for a key that only another class of a choice has: `lora_r` if `adapter` is none."""
    for key, (choice, current) in names.choices.items():
        # Classes of model families import jax.
        for other in choice.registry if choice.tag == "name" else ():
            for field_name, info in choice.pick(other).model_fields.items() if other != current else ():
                for mark in marks(info, Also):
                    if name in mark.names:
                        return f"did you mean `{key}={other} {key}.{field_name}=...`? {mark.note}".rstrip()
    return None


def _likeness(key: str, other: str) -> float:
    """A score from 0 to 1 for how likely `other` is the intended key. Groups and leaves are compared separately."""
    group, _, leaf = key.rpartition(".")
    its_group, _, its_leaf = other.rpartition(".")
    groups = 1.0 if group == its_group else SequenceMatcher(None, group, its_group).ratio()
    initials = "".join(part[:1] for part in its_leaf.split("_"))
    leaves = 0.9 if leaf == initials and len(leaf) > 1 else SequenceMatcher(None, leaf, its_leaf).ratio()
    return groups * leaves if min(groups, leaves) > 0.6 else 0.0


def _other_owner(group: str, leaf: str, choices: Mapping[str, tuple[Choice, str]]) -> str | None:
    if group not in choices:
        return None
    choice, name = choices[group]
    for other in choice.registry:
        if other != name and leaf in choice.pick(other).model_fields:
            return f"`{leaf}` belongs to `{choice.tag}: {other}`, and `{group}` is {name}"
    return None


def unnamed_choice_error(key: str, choice: Choice, layer: SettingsLayer | None) -> UserError:
    """The error for a choice without a name."""
    names = ", ".join(list(choice.registry)[:8])
    problem = f"`{key}` names no {choice.registry.noun}"
    return BadInput(problem, where=_set_by(layer, key), hint=f"write `{key}=NAME`, one of {names}")


def not_that(expected: str, value: Any, layer: SettingsLayer, key: str, hint: str | None = None) -> UserError:
    """The error for a value of the wrong kind, such as a number where a group belongs."""
    return BadInput(f"{expected}, not {short_value(value)}", where=_set_by(layer, key), hint=hint)


def in_group(cls: type[Settings], key: str, value: Any) -> str:
    """The hint for a value that was given to a group: the keys of the group that accept it, or else its first keys."""
    fields = cls.model_fields
    takes = [name for name, info in fields.items() if isinstance(value, str) and value in _choices(info.annotation)]
    if takes:
        return " or ".join(f"`{key}.{name}={value}`" for name in takes)
    return f"it has {some((f'`{key}.{name}`' for name in fields), 4)}"


def _choices(annotation: Any) -> list[Any]:
    return [choice for member in members(annotation) if get_origin(member) is Literal for choice in get_args(member)]


def wrong(key: str, info: FieldInfo, errors: list[Any], setter: Setter) -> list[UserError]:
    """Our errors for the errors that Pydantic found in one key or in its items.

    Args:
        setter: dotted key -> the layer that set it; None: no layer did.
    """
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1:
        about = f": {first_sentence(info.description)}" if first_sentence(info.description) else ""
        return [BadInput(f"`{key}` is required", where=NOBODY, hint=f"add `{key}={(info.examples or ['...'])[0]}`{about}")]
    options = [member for member in members(info.annotation) if member is not type(None)]
    if len(options) > 1 and (value_error := next((error for error in errors if error["type"] == "value_error"), None)):
        return [_wrong_part(key, info, value_error, setter)]
    # Pydantic reports an error for each member of a union. One error is reported here.
    if len(options) > 1:
        first = next((e for e in errors if e["type"] == "finite_number"), errors[0])
        noun = _WANTED["finite"] if first["type"] == "finite_number" else type_in_words(info.annotation)
        return [_wrong_item(key, key, noun, first, options, setter)]
    return [_wrong_part(key, info, error, setter) for error in errors]


def _wrong_part(key: str, info: FieldInfo, error: Any, setter: Setter) -> UserError:
    path = ".".join([key, *map(str, error["loc"][1:])])
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        where = _set_by(_setter(setter, path, key), path)
        return BadInput(f"`{path}`: {error_message(error)}", where=where, hint=_default_hint(key, info))
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return _wrong_item(path, key, f"{words} {context[name]:g}", error, [], setter, _default_hint(key, info))
    if kind in ("literal_error", "enum"):
        return _wrong_item(path, key, f"one of {context['expected']}", error, [info.annotation], setter)
    if kind == "missing":
        return BadInput(f"`{key}` lacks `{path}`", where=_set_by(_setter(setter, path, key), key))
    noun = type_in_words(info.annotation) if path == key and kind != "finite_number" else _WANTED.get(_kind(error), "")
    return _wrong_item(path, key, noun or f"valid ({error_message(error)})", error, [], setter)


def _default_hint(key: str, info: FieldInfo) -> str | None:
    """A hint that says what a key does, and its default."""
    about = first_sentence(info.description)
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if info.is_required() or isinstance(default, Settings | list | tuple | dict):
        return about
    way_out = "leave it out for the default" if default is None else f"the default is `{key}={yaml_line(default)}`"
    return f"{about}; {way_out}" if about else way_out


def _wrong_item(
    path: str, key: str, wish: str, error: Any, hints: list[Any], setter: Setter, about: str | None = None
) -> UserError:
    layer = _setter(setter, path, key)
    text = (layer.text(path) if layer else None) or error["input"]
    hint = about or _close_literal(text, hints) or _HINTS.get(_kind(error))
    return BadInput(f"`{path}` should be {wish}, not {short_value(text)}", where=_set_by(layer, path), hint=hint)


def broken_rule(key: str, leaves: Iterable[str], rule: str, setter: Setter, hint: str | None = None) -> UserError:
    """The error for a broken rule between several keys of the group at `key`. It lists those of `leaves` that the rule mentions, with
    the layers that set them."""
    words = {dotted_key(key, word) for word in re.findall(r"\w+(?:\.\w+)*", rule)}
    inside = [leaf for leaf in leaves if leaf.startswith(f"{key}." if key else "")]
    setters = [f"`{leaf}` {_set_by(setter(leaf), leaf)}" for leaf in inside if leaf in words]
    others = dict.fromkeys(layer.origin for leaf in inside if (layer := setter(leaf)))
    where = ", ".join(setters) or f"set by {', '.join(others) or 'default'}"
    return BadInput(f"`{key}`: {rule}" if key else rule, where=where, hint=hint)


def messages(error: Any) -> list[str]:
    """The messages of a Pydantic error: those of all broken rules of a `BrokenRules`, or else one message."""
    rules = getattr(error.get("ctx", {}).get("error"), "rules", None)
    return [" ".join(rule.split()) for rule in rules] if rules else [error_message(error)]


def error_message(error: Any) -> str:
    """The message of a Pydantic error in one line, without Pydantic's prefix."""
    return " ".join(str(error.get("ctx", {}).get("error", error["msg"])).split())


def _setter(setter: Setter, path: str, key: str) -> SettingsLayer | None:
    return setter(path) or setter(key)


def _set_by(layer: SettingsLayer | None, key: str) -> str:
    return f"set by {layer.where(key)}" if layer else "set by default"


def _kind(error: Any) -> str:
    return error["type"].split("_")[0]


def type_in_words(hint: Any) -> str:
    """A type as a phrase: `a whole number or none`."""
    names = dict.fromkeys(_type_words(member) for member in members(hint))
    return " or ".join(names)


def _type_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(yaml_line(option) for option in get_args(hint))
    kind = get_origin(hint) or hint
    if kind not in (int, float, bool, str, list, tuple, dict, type(None)) and get_args(hint):
        return type_in_words(get_args(hint)[0])
    name = {str: "string", type(None): "none"}.get(kind, getattr(kind, "__name__", "")).lower()
    return _WANTED.get(name, f"a {name}")


def short_value(value: Any) -> str:
    """A value in quotes, as it was written, shortened to 60 characters."""
    if isinstance(value, Mapping) and SELF in value:
        value = value[SELF]
    if isinstance(value, RefusedValue):
        value = value.value
    is_yaml = isinstance(value, int | float | list | tuple | dict)
    text = "none" if value is None else yaml_line(value) if is_yaml else " ".join(str(value).split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def _close_literal(value: Any, hints: Iterable[Any]) -> str | None:
    literals = [get_args(hint) for hint in hints if get_origin(hint) is Literal]
    options = [str(option) for options in literals for option in options]
    close = get_close_matches(str(value), options, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def first_sentence(text: str | None) -> str | None:
    """The first sentence of a key's documentation, to serve as a hint."""
    if not text:
        return None
    first = re.split(r"(?<=[.:;])\s", " ".join(text.split()))[0].rstrip(".:;")
    return first if len(first) <= 100 else None
