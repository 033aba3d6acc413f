"""The words for every mistake in settings: what is wrong with which key, who set it, and the way out, in four lines at most.

Notable: a misspelt key is answered from the keys that this very run could have had. Same group first, then the same name in
another group, then the other classes of a choice (`b1` belongs to `optimizer=adamw`). Knows nothing of how layers are read.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from argosy.core.errors import BadInput, UserError, nearest
from argosy.core.schema import Choice, Settings, members
from argosy.core.words import SELF, written

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


def unknown(key: str, where: str, known: Iterable[str], choices: Mapping[str, tuple[Choice, str]]) -> UserError:
    """A key that nothing reads. `known`: every dotted key of this run; `choices`: dotted key -> choice and the name it has."""
    return BadInput(f"unknown setting `{key}`", where=where, hint=_nearest_key(key, sorted(set(known)), choices))


def _nearest_key(key: str, known: list[str], choices: Mapping[str, tuple[Choice, str]]) -> str:
    group, _, leaf = key.rpartition(".")
    if key in known:
        return f"in a file, write `{leaf}` under `{group}`, without the dot"
    if group in known and not any(other.startswith(f"{group}.") for other in known):
        return f"`{group}` is one value, without keys of its own"
    if owner := _other_owner(group, leaf, choices):
        return owner
    if found := max(known, key=lambda other: _likeness(key, other), default=None):
        if _likeness(key, found) > 0:
            return f"did you mean `{found}`?"
    if same := [other for other in known if other.rpartition(".")[2] == leaf]:
        return f"did you mean `{same[0]}`?"
    leaves = {other.rpartition(".")[2]: other for other in reversed(known)}
    if close := get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return f"did you mean `{leaves[close[0]]}`?"
    if beside := [other for other in known if other.rpartition(".")[0] == group]:
        return nearest(leaf, (other.rpartition(".")[2] for other in beside)) or ""
    return "`argosy config reference` lists every setting"


def _likeness(key: str, other: str) -> float:
    """How well `other` could be what was meant, 0 where it could not: groups and leaves are compared apart."""
    group, _, leaf = key.rpartition(".")
    its_group, _, its_leaf = other.rpartition(".")
    groups = 1.0 if group == its_group else SequenceMatcher(None, group, its_group).ratio() if group and its_group else 0.0
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


def unnamed(key: str, choice: Choice, where: str) -> UserError:
    """A choice that nobody made."""
    names = ", ".join(list(choice.registry)[:8])
    return BadInput(f"`{key}` names no {choice.registry.noun}", where=where, hint=f"add `{key}=NAME`, one of {names}")


def not_that(what: str, value: Any, where: str) -> UserError:
    """A value of the wrong form altogether: a leaf where a group belongs."""
    return BadInput(f"{what}, not {shown(value)}", where=where)


def wrong_type(key: str, hint: Any, value: Any, kind: str, where: str) -> UserError:
    """A value that is not of its key's type; `kind` is Pydantic's name of the error."""
    return BadInput(f"`{key}` should be {wanted(hint)}, not {shown(value)}", where=where, hint=_HINTS.get(kind.split("_")[0]))


def wrong(key: str, info: FieldInfo, errors: list[Any], where: Callable[[str], str]) -> list[UserError]:
    """What Pydantic refused of one key, or of the items in it."""
    if errors[0]["type"] == "missing":
        about = f": {_sentence(info.description)}" if info.description else ""
        return [BadInput(f"`{key}` is required", where="set by nobody", hint=f"add `{key}=...`{about}")]
    options = [member for member in members(info.annotation) if member is not type(None)]
    if len(options) > 1:
        hint = _close_literal(errors[0]["input"], options) or _HINTS.get(errors[0]["type"].split("_")[0])
        what = f"`{key}` should be {wanted(info.annotation)}, not {shown(errors[0]['input'])}"
        return [BadInput(what, where=where(key), hint=hint)]
    return [_wrong_item(key, info, error, where) for error in errors]


def _wrong_item(key: str, info: FieldInfo, error: Any, where: Callable[[str], str]) -> UserError:
    path = ".".join([key, *map(str, error["loc"][1:])])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return BadInput(f"`{path}`: {_message(error)}", where=where(path))
    hint = _HINTS.get(kind.split("_")[0]) or _sentence(info.description)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return BadInput(f"`{path}` should be {words} {context[name]:g}, not {shown(value)}", where=where(path), hint=hint)
    if kind == "literal_error":
        hint = _close_literal(value, [info.annotation]) or hint
        return BadInput(f"`{path}` should be one of {context['expected']}, not {shown(value)}", where=where(path), hint=hint)
    if noun := _WANTED.get(kind.split("_")[0]):
        noun = noun if error["loc"][1:] else wanted(info.annotation)
        return BadInput(f"`{path}` should be {noun}, not {shown(value)}", where=where(path), hint=hint)
    return BadInput(f"`{path}`: {_message(error)}, not {shown(value)}", where=where(path), hint=hint)


def broken_rule(key: str, cls: type[Settings], error: Any, origin: Callable[[str], str | None]) -> UserError:
    """A rule between several keys of one group; those that its message names are told with who set them."""
    message = _message(error)
    paths = {name: f"{key}.{name}" if key else name for name in cls.model_fields}
    named = [name for name in paths if re.search(rf"\b{name}\b", message)]
    setters = [f"`{paths[name]}` set by {origin(paths[name]) or 'default'}" for name in named]
    others = dict.fromkeys(found for path in paths.values() if (found := origin(path)))
    where = ", ".join(setters) or f"set by {', '.join(others) or 'default'}"
    return BadInput(f"`{key}`: {message}" if key else message, where=where)


def wanted(hint: Any) -> str:
    """A type in words: `a whole number or none`."""
    names = dict.fromkeys(_wanted(member) for member in members(hint))
    return " or ".join(names)


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(written(option) for option in get_args(hint))
    kind = get_origin(hint) or hint
    if kind not in (int, float, bool, str, list, tuple, dict, type(None)) and get_args(hint):
        return wanted(get_args(hint)[0])
    name = {str: "string", type(None): "none"}.get(kind, getattr(kind, "__name__", "")).lower()
    return _WANTED.get(name, f"a {name}")


def shown(value: Any) -> str:
    """A value as it was written, in one short piece."""
    if isinstance(value, Mapping) and SELF in value:
        value = value[SELF]
    text = written(value) if isinstance(value, int | float | None | list | tuple | dict) else " ".join(str(value).split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def _close_literal(value: Any, hints: Iterable[Any]) -> str | None:
    options = [str(option) for hint in hints if get_origin(hint) is Literal for option in get_args(hint)]
    close = get_close_matches(str(value), options, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def _message(error: Any) -> str:
    text = str(error.get("ctx", {}).get("error", error["msg"]))
    return " ".join(text.split())


def _sentence(text: str | None) -> str | None:
    """The first sentence of a key's documentation, to serve as a hint."""
    if not text:
        return None
    first = re.split(r"(?<=[.:;])\s", " ".join(text.split()))[0].rstrip(".:;")
    return first if len(first) <= 100 else None
